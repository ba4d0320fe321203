"""The comparison from start to end: convert, judge, time, and keep every finished group of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..calibration import Statistics
from ..checkpoints import MedusaHeads
from ..runtime.heads import DraftHeads
from ..runtime.model import load_base
from . import prepare
from .measure import Bench, check_identity
from .peers import run_peer
from .results import Results
from .settings import PLAIN, Settings, Variant
from .summary import rows_of

RESULTS = "results.json"
_SOURCE = Variant("fp16", "rtn")

# (steps done, steps in all, what comes next)
Progress = Callable[[int, int, str], None]


def compare(
    settings: Settings,
    tokenizer: Any,
    out: Path,
    calibration: str | None = None,
    peers: list[str] | None = None,
    peer_python: str = "",
    progress: Progress | None = None,
) -> tuple[Results, list[dict[str, Any]]]:
    """Measure all rows; results and their summary. What an earlier run of the same settings finished is
    kept. Raises VerifyError where a row's text is not plain greedy decoding's, InputError for other
    settings."""
    file = out / RESULTS
    results = Results.load(file, settings) if file.exists() else Results.begin(settings)
    groups = [(repeat, batch) for repeat in range(settings.repeats) for batch in settings.batches]
    rows, peers = settings.rows, peers or []
    todo = [group for group in groups if group not in results.complete]
    steps = 2 * len(settings.variants) + 1 + len(todo) * (len(rows) + len(peers))
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, steps, what)
        done += 1

    tell("collecting statistics")
    statistics_file = prepare.statistics_for(settings, tokenizer, calibration, out)
    folders: dict[str, Path] = {}
    for variant in settings.variants:
        tell(f"converting {variant.name}")
        folders[variant.name] = prepare.converted(settings, variant, statistics_file, out)
    base = load_base(settings.base, settings.base_dtype, activation=settings.base_activation)
    source = prepare.load(
        prepare.converted(settings, _SOURCE, statistics_file, out), base, settings.heads_activation
    )
    statistics = Statistics.load(statistics_file)
    packed: dict[str, DraftHeads] = {}
    if results.plain_peak_memory_bytes is None:
        results.plain_peak_memory_bytes = prepare.peak_memory(settings, None)
    for name, folder in folders.items():
        tell(f"judging {name}")
        heads: MedusaHeads
        heads, packed[name], seconds = prepare.load(folder, base, settings.heads_activation)
        if name not in results.variants:
            result = prepare.describe(settings, folder, packed[name], seconds)
            result.quality = prepare.quality(heads, source[0], settings.base, statistics)
            results.variants[name] = result
            results.save(file, rows_of(results))
    del source
    bench = Bench(settings, base, tokenizer, packed)
    for repeat, batch in todo:
        for variant_name, tree in rows:
            what = ", ".join(part for part in (variant_name, tree) if part)
            tell(f"{what}, batch {batch}, repeat {repeat + 1}")
            run, tokens = bench.run(variant_name, tree, batch, repeat)
            if results.reference is None and variant_name == PLAIN:
                results.reference = tokens
            check_identity(f"{what}, batch {batch}", tokens, results.reference or [], tokenizer)
            results.runs.append(run)
        for peer in peers:
            tell(f"{peer}, batch {batch}, repeat {repeat + 1}")
            results.peers.append(run_peer(peer, peer_python, settings, batch, repeat))
        results.complete.append((repeat, batch))
        results.save(file, rows_of(results))
    return results, rows_of(results)
