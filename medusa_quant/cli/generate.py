"""`medusa-quant generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .options import (
    BaseActivationOption,
    BaseArgument,
    BaseDtypeOption,
    DeviceOption,
    DraftHeadsOption,
    HeadsActivationOption,
    JsonOption,
    SpeculationOption,
    TreeOption,
)
from .output import print_json, print_table, print_warnings, size

if TYPE_CHECKING:
    from ..runtime.engine import Engine, Output


def generate(
    base: BaseArgument,
    heads: DraftHeadsOption = None,
    prompt: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A prompt; may be given several times."),
    ] = None,
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A .txt or .jsonl file of prompts, or - for standard input."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests running together.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest output.")] = 128,
    max_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Longest prompt and output together. [the base's context]"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens with this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens only; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same text, whatever the batch.")] = 0,
    acceptance: Annotated[
        str, typer.Option(help="exact, or typical: not the base's distribution (temperature > 0).")
    ] = "exact",
    stop: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Ends the text; may be given several times."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the chat template.")] = True,
    base_dtype: BaseDtypeOption = "fp32",
    base_activation: BaseActivationOption = "int8",
    heads_activation: HeadsActivationOption = "int8",
    speculation: SpeculationOption = "auto",
    tree: TreeOption = "default",
    device: DeviceOption = "cpu",
    stats: Annotated[bool, typer.Option("--stats", help="Speed, acceptance, time by part, memory.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The text is the base's own: heads only draft. One prompt streams as it is written."""
    from ..runtime.engine import Engine
    from ..runtime.model import load_tokenizer
    from ..runtime.parallel import follow, load_pair
    from ..runtime.ranks import joined
    from ..runtime.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        acceptance=acceptance,
        stop=tuple(stop or ()),
    )
    with joined(device) as ranks:
        with ranks.agreed():
            given = _prompts(prompt, prompts) if ranks.leads else []
        model, draft = load_pair(
            base,
            heads,
            base_dtype=base_dtype,
            base_activation=base_activation,
            heads_activation=heads_activation,
            device=device,
            ranks=ranks,
        )
        if not ranks.leads:
            return follow(model, draft, ranks)
        engine = Engine(
            model,
            draft,
            tokenizer=load_tokenizer(base),
            speculation=speculation,
            tree=tree,
            max_batch=batch,
            max_len=max_len,
        )
        tokens = [_encode(engine, text, chat) for text in given]
        started = time.perf_counter()
        streaming = len(given) == 1 and not as_json
        outputs = engine.generate(
            tokens, params, on_text=(lambda _, text: typer.echo(text, nl=False)) if streaming else None
        )
        seconds = time.perf_counter() - started
    if engine.heads is not None and engine.heads.nan_heads:
        named = ", ".join(map(str, sorted(engine.heads.nan_heads)))
        print_warnings([f"heads {named} give NaN: their drafts are worthless"])
    summary = _stats(engine, outputs, seconds)
    if as_json:
        print_json({"outputs": [_as_dict(output) for output in outputs], "stats": summary})
        return
    if streaming:
        typer.echo()
    else:
        for number, output in enumerate(outputs):
            typer.echo(f"[{number}] {output.text}\n")
    if stats:
        print_table("", ("", ""), _rows(summary))


def _prompts(typed: list[str] | None, file: str | None) -> list[Any]:
    from ..calibration.prompts import read_prompts
    from ..errors import InputError

    given: list[Any] = list(typed or [])
    if file is not None:
        given += [
            [{"role": role, "content": content} for role, content in read.messages]
            for read in read_prompts(file)
        ]
    if not given:
        raise InputError("no prompt", fix="pass --prompt TEXT or --prompts FILE")
    return given


def _encode(engine: Engine, prompt: Any, chat: bool) -> list[int]:
    """A prompt as typed, or a conversation; without the chat template, its contents."""
    if isinstance(prompt, str):
        return engine.encode(prompt, chat)
    if chat:
        return engine.encode_messages(prompt)
    return engine.encode("\n".join(message["content"] for message in prompt), chat=False)


def _as_dict(output: Output) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "finish_reason": output.finish_reason,
        "acceptance_length": output.acceptance_length,
    }


def _stats(engine: Engine, outputs: list[Output], seconds: float) -> dict[str, Any]:
    tokens = sum(len(output.token_ids) for output in outputs)
    base = engine.base
    return {
        "tokens": tokens,
        "elapsed_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "base": f"{base.dtype}, {base.lm_head.activation} activations, kernels {base.lm_head.backend}",
        "heads_activation": None if engine.heads is None else engine.heads.activation,
        "heads_bytes": 0 if engine.heads is None else engine.heads.nbytes,
        "peak_memory_bytes": _peak_memory(),
        **engine.metrics.as_dict(),
    }


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    positions = " ".join(f"{rate:.3f}" for rate in summary["acceptance_rate_per_position"]) or "-"
    rows = [
        ("tokens", str(summary["tokens"])),
        ("tok/s", f"{summary['tokens_per_second']:.1f}"),
        ("base", summary["base"]),
        ("mean acceptance length", f"{summary['mean_acceptance_length']:.3f}"),
        ("acceptance per position", positions),
        *((f"seconds in {part}", f"{spent:.2f}") for part, spent in summary["seconds"].items()),
        ("preemptions", str(summary["num_preemptions"])),
    ]
    if summary["heads_activation"]:
        rows.append(
            ("heads", f"{size(summary['heads_bytes'])} a step, {summary['heads_activation']} activations")
        )
    if summary["peak_memory_bytes"]:
        rows.append(("peak memory", size(summary["peak_memory_bytes"])))
    return rows


def _peak_memory() -> int | None:
    """Peak resident bytes of this process, where the system tells."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), None)
    return None if line is None else int(line.split()[1]) * 1024
