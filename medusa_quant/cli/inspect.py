"""`medusa-quant inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption
from .output import print_json, print_table, print_warnings, size

if TYPE_CHECKING:
    from ..checkpoints import HeadTensor, MedusaHeads


def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint, repo id or converted folder.")],
    as_json: JsonOption = False,
) -> None:
    """Reads headers and manifests only, never the weights."""
    from ..checkpoints import load_heads
    from ..workspace import Workspace

    heads = load_heads(path)
    workspace = Workspace.find(path)
    print_warnings(heads.warnings)
    rows = [_row(tensor) for tensor in heads]
    if as_json:
        summary = _header(heads)
        if workspace is not None:
            manifest = workspace.manifest
            summary |= {
                "tp": manifest.tp,
                "lm_head_split": manifest.lm_head_split,
                "weight_type": manifest.weight_type,
                "group_size": manifest.group_size,
                "source": manifest.source,
                "bytes": sum(entry.bytes for entry in manifest.files),
            }
        print_json({**summary, "tensors": rows, "warnings": heads.warnings})
        return
    header = _header(heads)
    title = ", ".join(f"{key} {value}" for key, value in header.items() if key != "path")
    columns = ("tensor", "key", "shape", "dtype", "group", "method", "error")
    print_table(title, columns, [[_cell(row[column]) for column in columns] for row in rows])
    if workspace is not None:
        written = sum(entry.bytes for entry in workspace.manifest.files)
        split = workspace.manifest.lm_head_split
        typer.echo(f"{len(workspace.manifest.files)} parts, {size(written)}, LM matrices split on {split}")


def _header(heads: MedusaHeads) -> dict[str, object]:
    return {
        "path": str(heads.path),
        "format": heads.format,
        "heads": heads.num_heads,
        "layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "lm_head": "shared" if heads.shared_lm_head else "own",
        "bias": heads.has_bias,
    }


def _row(tensor: HeadTensor) -> dict[str, object]:
    return {
        "tensor": str(tensor.id),
        "head": tensor.id.head,
        "layer": tensor.id.layer,
        "role": tensor.id.role,
        "key": tensor.key,
        "file": tensor.file.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "group": tensor.group_size,
        "symmetric": tensor.symmetric,
        "method": tensor.method,
        "error": None if tensor.error is None else f"{tensor.error['relative']:.3g}",
    }


def _cell(value: object) -> object:
    return "-" if value is None else value
