"""Runs to rows: medians over repeats, each speed held against plain decoding of the same repeat."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import Results, Run
from .settings import PLAIN


def rows_of(results: Results) -> list[dict[str, Any]]:
    """One row for each variant, tree and batch that has runs, by batch, in the order measured."""
    groups: dict[tuple[int, str, str], list[Run]] = {}
    for run in results.runs:
        groups.setdefault((run.batch, run.variant, run.tree), []).append(run)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    rows = [_row(results, runs) for _, runs in ordered]
    return rows + _peer_rows(results)


def _row(results: Results, runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0]
    plain = {run.repeat: run for run in results.runs if run.variant == PLAIN and run.batch == first.batch}
    ratios = [run.tokens_per_second / plain[run.repeat].tokens_per_second for run in runs]
    speeds = [run.tokens_per_second for run in runs]
    variant = results.variants.get(first.variant)
    quality = variant.quality if variant else None
    return {
        "variant": first.variant,
        "tree": first.tree,
        "batch": first.batch,
        "repeats": len(runs),
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_min": min(speeds),
        "tokens_per_second_max": max(speeds),
        "speedup": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "acceptance_length": statistics.median(run.acceptance_length for run in runs),
        "acceptance_per_position": _middle(runs).acceptance_per_position,
        "nodes_per_draft": statistics.median(run.nodes_per_draft for run in runs),
        **{f"{part}_ms_per_step": _per_step(runs, part) for part in first.parts},
        "bytes": variant.bytes if variant else 0,
        "load_seconds": variant.load_seconds if variant else None,
        "peak_memory_bytes": variant.peak_memory_bytes if variant else results.plain_peak_memory_bytes,
        # Another text ends the comparison, so that a row exists only where it is the same.
        "same_text_as_plain": True,
        "predicted_acceptance_ratio": quality["acceptance_ratio"] if quality else None,
        "min_agreement": quality["min_agreement"] if quality else None,
    }


def _peer_rows(results: Results) -> list[dict[str, Any]]:
    groups: dict[tuple[str, int], list[float]] = {}
    for run in results.peers:
        if run.error is None:
            groups.setdefault((run.peer, run.batch), []).append(run.tokens / run.seconds)
    return [
        {
            "variant": peer,
            "tree": "",
            "batch": batch,
            "repeats": len(speeds),
            "tokens_per_second": statistics.median(speeds),
            "tokens_per_second_min": min(speeds),
            "tokens_per_second_max": max(speeds),
        }
        for (peer, batch), speeds in groups.items()
    ]


def _middle(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.acceptance_length)[len(runs) // 2]


def _per_step(runs: Sequence[Run], part: str) -> float:
    return statistics.median(run.parts[part] / max(run.steps, 1) * 1e3 for run in runs)


def write_csv(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(file, "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Any) -> Any:
    return " ".join(f"{part:.4f}" for part in value) if isinstance(value, list) else value
