"""The dtypes of a conversion with `--dtype auto`, or of a plan given by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .output import byte_progress, print_table, size

if TYPE_CHECKING:
    from ..checkpoints import MedusaHeads
    from ..plan import Choice, ConvertOptions


def read_plan(file: Path) -> tuple[str, tuple[Choice, ...]]:
    """The dtype of what is not named, and the choices, of a plan.json. Raises InputError if it is none."""
    from ..checkpoints.source import read_json
    from ..errors import InputError
    from ..plan import Choice

    if not file.is_file():
        raise InputError("no such plan", file=file)
    content = read_json(file)
    try:
        choices = tuple(Choice(**entry) for entry in content["choices"])
        return str(content.get("dtype", "fp16")), choices
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "not a plan",
            file=file,
            expected='{"dtype": "fp16", "choices": [{"head", "role", "dtype", "group_size"}, ...]}',
        ) from error


def choose_dtypes(
    heads: MedusaHeads, options: ConvertOptions, budget_mb: float | None, max_loss: float | None, quiet: bool
) -> tuple[ConvertOptions, dict[str, Any]]:
    """Options with the dtypes measured to fit the limit; prints the curve, unless quiet."""
    from dataclasses import replace

    from ..calibration import Statistics, held_out
    from ..calibration.calibrated import shared_lm_matrix
    from ..calibration.mixed import plan_mixed
    from ..errors import InputError
    from ..plan import make_plan

    if options.calibration is None:
        raise InputError("--dtype auto measures on held-out states", fix="pass --calibration STATS")
    statistics = Statistics.load(options.calibration)
    resolved = make_plan(heads, options).heads
    if any(tensor.quantized for tensor in resolved):
        raise InputError("the source is quantized already", file=heads.path, fix="convert from the original")
    statistics.check_fits(resolved.hidden_size, None, str(heads.path))
    with byte_progress() as progress:
        mixed = plan_mixed(
            resolved,
            held_out(statistics, resolved.num_heads, 1024),
            budget=None if budget_mb is None else int(budget_mb * 1e6),
            max_loss=max_loss,
            method="rtn" if options.method == "rtn" else "mse",
            shared=shared_lm_matrix(resolved, options.base, statistics),
            progress=None if progress is None else lambda done, total: progress(done, total, "measuring"),
        )
    if not quiet:
        rows = [
            (
                size(point.bytes),
                f"{point.acceptance:.4f}",
                "-" if point.changed is None else _describe(point.changed),
            )
            for point in mixed.curve
        ]
        print_table("bytes against predicted acceptance", ("matrices", "acceptance", "change"), rows)
        typer.echo(json.dumps(mixed.as_dict()["choices"]))
    return replace(options, dtype="fp16", choices=mixed.choices), mixed.as_dict()


def _describe(choice: Choice) -> str:
    group = "" if choice.group_size in (None, -1) else f" g{choice.group_size}"
    return f"head {choice.head} {choice.role}: {choice.dtype}{group}"
