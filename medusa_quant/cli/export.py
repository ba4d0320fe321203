"""`medusa-quant export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import ForceOption, JsonOption, SourceArgument
from .output import byte_progress, print_json, print_warnings, size


def export(
    source: SourceArgument,
    layout: Annotated[str, typer.Option(help="hf (format A, dequantized), vllm (dequantized) or gptq.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Target folder. [SOURCE-LAYOUT beside the source]"),
    ] = None,
    gptq_format: Annotated[str, typer.Option(help="Layout gptq: gptq (v1) or gptq_v2.")] = "gptq",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ranks are merged; gptq gets the same codes, bit for bit."""
    from ..conversion import convert
    from ..errors import InputError
    from ..plan import ConvertOptions

    if layout.lower() not in ("hf", "vllm", "gptq"):
        raise InputError(
            "bad --layout", expected="hf | vllm | gptq", found=layout, fix="use convert for rank files"
        )
    target = out if out is not None else Path(f"{source.rstrip('/')}-{layout.lower()}")
    options = ConvertOptions(layout=layout.lower(), gptq_format=gptq_format.lower())
    with byte_progress() as progress:
        result = convert(source, target, options, force=force, progress=progress)
    print_warnings(result.plan.warnings)
    written = sum(entry.bytes for entry in result.manifest.files)
    if as_json:
        print_json({"folder": str(result.folder), "layout": layout.lower(), "bytes": written})
    else:
        typer.echo(f"{result.folder}: {layout.lower()}, {size(written)}")
