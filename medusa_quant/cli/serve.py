"""`medusa-quant serve`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import (
    BaseActivationOption,
    BaseArgument,
    BaseDtypeOption,
    DeviceOption,
    DraftHeadsOption,
    HeadsActivationOption,
    SpeculationOption,
    TreeOption,
)
from .output import notes, size


def serve(
    base: BaseArgument,
    heads: DraftHeadsOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    served_model_name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What clients call the model. [the base's file or folder name]"),
    ] = None,
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(envvar="MEDUSA_QUANT_API_KEY", help="Asked for under /v1."),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Requests running together.")] = 8,
    max_queue: Annotated[int, typer.Option(help="Requests waiting; beyond, 429.")] = 64,
    max_len: Annotated[int, typer.Option(help="Longest prompt and answer together, in tokens.")] = 2048,
    max_body: Annotated[int, typer.Option(help="Longest request body, in bytes; beyond, 413.")] = 1_000_000,
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Seconds a request may take; it ends with what there is."),
    ] = None,
    drain_seconds: Annotated[int, typer.Option(help="Longest wait for open requests at the end.")] = 30,
    base_dtype: BaseDtypeOption = "fp32",
    base_activation: BaseActivationOption = "int8",
    heads_activation: HeadsActivationOption = "int8",
    speculation: SpeculationOption = "auto",
    tree: TreeOption = "default",
    device: DeviceOption = "cpu",
) -> None:
    """Completions, chat, models, health and metrics, as OpenAI's and Prometheus' clients expect them.
    SIGTERM stops listening and lets open requests end."""
    from ..errors import InputError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InputError(f"serving needs {', '.join(missing)}", fix="pip install 'medusa-quant[serve]'")
    for name, value, least in (
        ("--max-queue", max_queue, 0),
        ("--max-body", max_body, 1),
        ("--drain-seconds", drain_seconds, 0),
        ("--timeout", 1 if timeout is None else timeout, 0),
    ):
        if value < least:
            raise InputError(f"bad {name}", expected=f"{least} or more", found=value)
    from ..runtime.engine import Engine
    from ..runtime.model import load_tokenizer
    from ..runtime.parallel import follow, load_pair
    from ..runtime.ranks import joined
    from ..serving.app import Limits, Service, build_app
    from ..serving.server import Server, bind

    with joined(device) as ranks:
        with ranks.agreed():
            listener = bind(host, port) if ranks.leads else None
        model, draft = load_pair(
            base,
            heads,
            base_dtype=base_dtype,
            base_activation=base_activation,
            heads_activation=heads_activation,
            device=device,
            ranks=ranks,
        )
        if listener is None:
            return follow(model, draft, ranks)
        engine = Engine(
            model,
            draft,
            tokenizer=load_tokenizer(base),
            speculation=speculation,
            tree=tree,
            max_batch=max_batch,
            max_len=max_len,
        )
        name = served_model_name or Path(base).name
        service = Service(engine, name, Limits(max_queue, max_body, timeout))
        notes.print(
            f"{name} at http://{host}:{listener.getsockname()[1]}/v1, {engine.batch.max_len} tokens of "
            f"context, {max_batch} slots with {size(engine.batch.cache_bytes)} of keys and values",
            markup=False,
        )
        try:
            Server(build_app(service, api_key), service, drain_seconds).serve_on(listener)
        finally:
            engine.close()
