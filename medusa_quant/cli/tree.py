"""`medusa-quant tree`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    BaseActivationOption,
    BaseArgument,
    BaseDtypeOption,
    DeviceOption,
    HeadsActivationOption,
    JsonOption,
)
from .output import print_json, print_table, print_warnings

# Sizes `auto` tries: a step's cost grows in stairs, as kernels take rows in blocks.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)


def tree(
    base: BaseArgument,
    heads: Annotated[str, typer.Argument(help="Draft heads: a checkpoint or a converted folder.")],
    calibration: Annotated[str, typer.Option(help="Statistics with held-out states (`calibrate`).")],
    out: Annotated[Path, typer.Option(help="JSON file to write; generate and serve take it as --tree.")],
    nodes: Annotated[
        str, typer.Option(help="Nodes, root included; or auto: the size with most tokens a second here.")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Requests running together; auto measures with them.")] = 1,
    top_k: Annotated[int, typer.Option(help="Guesses of each head looked at.")] = 10,
    base_dtype: BaseDtypeOption = "fp32",
    base_activation: BaseActivationOption = "int8",
    heads_activation: HeadsActivationOption = "int8",
    device: DeviceOption = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The tree that gains most with these heads: grown node by node by how often each guess was right on one
    half of the held-out states. The acceptance printed is that on the other half."""
    from ..calibration import Statistics, held_out
    from ..calibration.calibrated import judge, shared_lm_matrix
    from ..calibration.draft_tree import choose_tree, expected_acceptance
    from ..checkpoints import load_heads
    from ..errors import InputError
    from ..runtime.tree import MAX_NODES, Tree, save_tree

    sizes = SIZES if nodes == "auto" else (_count("--nodes", nodes, MAX_NODES),)
    for name, value in (("--batch", batch), ("--top-k", top_k)):
        _count(name, str(value), 10_000)
    if out.exists() and not force:
        raise InputError("the target exists", file=out, fix="pass --force to replace it")
    statistics, loaded = Statistics.load(calibration), load_heads(heads)
    statistics.check_fits(loaded.hidden_size, None, heads)
    shared = shared_lm_matrix(loaded, base, statistics)
    ranks = judge(loaded, held_out(statistics, loaded.num_heads), None, shared).ranks
    chosen_on, reported_on = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    if not len(chosen_on):
        raise InputError("a single held-out state cannot choose and judge a tree", file=calibration)
    candidates: dict[int, list[Any]] = {}
    for size in sizes:
        choices = choose_tree(chosen_on, size, top_k)
        candidates.setdefault(len(choices) + 1, choices)
    rows: list[dict[str, Any]] = [
        {"nodes": size, "acceptance_length": expected_acceptance(reported_on, choices)}
        for size, choices in candidates.items()
    ]
    best = rows[-1]
    if nodes == "auto":
        from ..runtime.heads import DraftHeads
        from ..runtime.model import load_base
        from ..runtime.step_cost import step_seconds

        model = load_base(base, base_dtype, activation=base_activation, device=device)
        trees = [Tree.of(choices) for choices in candidates.values()]
        seconds = step_seconds(model, DraftHeads(loaded, model, heads_activation), trees, batch)
        for row, spent, choices in zip(rows, seconds, candidates.values(), strict=True):
            row["step_ms"] = spent * 1e3
            # Chosen by the half the trees were grown on, so that the other half still judges.
            row["tokens_per_second"] = batch * row["acceptance_length"] / spent
            row["chosen_by"] = batch * expected_acceptance(chosen_on, choices) / spent
        best = max(rows, key=lambda row: row["chosen_by"])
        for row in rows:
            del row["chosen_by"]
    result = {
        "heads": heads,
        "base": base,
        "held_out_states": len(reported_on),
        "batch": batch,
        **best,
        "tried": rows,
    }
    save_tree(out, candidates[best["nodes"]], result)
    if nodes != "auto" and best["nodes"] < sizes[0]:
        print_warnings([f"only {best['nodes']} nodes were ever right on these states"])
    if nodes == "auto" and best["nodes"] == 1:
        print_warnings([f"no tree pays at batch {batch} here: plain decoding is as fast"])
    if as_json:
        print_json(result)
        return
    columns = ("nodes", "acceptance", "ms/step", "tok/s", "")
    print_table(
        f"{len(reported_on):,} held-out states, batch {batch}",
        columns,
        [_row(row, row is best) for row in rows],
        right=" ".join(columns),
    )
    typer.echo(f"{out}: {best['nodes']} nodes, acceptance length {best['acceptance_length']:.3f}")


def _row(row: dict[str, Any], best: bool) -> tuple[str, ...]:
    measured = [f"{row[name]:.{digits}f}" if name in row else "-" for name, digits in _MEASURED]
    return (str(row["nodes"]), f"{row['acceptance_length']:.3f}", *measured, "chosen" if best else "")


_MEASURED = (("step_ms", 2), ("tokens_per_second", 1))


def _count(name: str, value: str, most: int) -> int:
    from ..errors import InputError

    if not value.isdigit() or not 1 <= int(value) <= most:
        raise InputError(f"bad {name}", expected=f"1 to {most}", found=value)
    return int(value)
