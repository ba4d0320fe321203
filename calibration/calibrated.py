"""A conversion with calibration: quantize for the inputs seen, judge the result, and only then replace."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints import MedusaHeads, load_heads
from ..checkpoints.base import base_lm_head, check_fits
from ..conversion import ConvertResult, Progress, convert
from ..plan import ConvertOptions, make_plan
from ..stages import plain_quantizer
from ..workspace.manifest import Manifest
from .evaluation import HeldOut, Report, evaluate, held_out
from .forward import Matrix
from .gate import Gate, draft_tree
from .quantizer import CalibratedQuantizer
from .statistics import Statistics


def convert_calibrated(
    heads: MedusaHeads,
    out: str | Path,
    options: ConvertOptions,
    gate: Gate | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> tuple[ConvertResult, Report]:
    """`convert` with options.calibration; the report on held-out states goes into the manifest.

    Method rtn is carried out as without calibration, and only judged; mse keeps a row's rounding to nearest
    where its clipping would raise the output error. Raises GateError, and
    leaves the old folder as it was, where the result falls below the gate; InputError where statistics
    and heads do not belong together.
    """
    assert options.calibration is not None
    statistics = Statistics.load(options.calibration)
    plan = make_plan(heads, options)
    quantizer = CalibratedQuantizer(plan.heads, statistics, options.low_rank)
    needs_inputs = options.method != "rtn" or options.low_rank > 0
    data = held_out(statistics, plan.heads.num_heads)
    shared = shared_lm_matrix(plan.heads, options.base, statistics)
    reports: list[Report] = []

    def finish(folder: Path, manifest: Manifest) -> None:
        report = judge(load_heads(folder), data, plan.heads, shared)
        manifest.report = {"calibration": quantizer.report, "held_out": report.as_dict()}
        reports.append(report)
        if gate is not None:
            gate.check(report, str(out))

    result = convert(
        heads,
        out,
        options,
        force=force,
        progress=progress,
        quantizer=quantizer if needs_inputs else plain_quantizer,
        finish=finish,
    )
    return result, reports[0]


def judge(
    heads: MedusaHeads, data: HeldOut, source: MedusaHeads | None = None, shared: Matrix | None = None
) -> Report:
    """Heads on held-out states with the tree the runtime drafts by default."""
    return evaluate(heads, data, draft_tree(heads.num_heads), source, shared)


def shared_lm_matrix(heads: MedusaHeads, base: str | None, statistics: Statistics) -> Matrix | None:
    """The base's LM matrix for heads that share it: `base`'s, or that of the base calibrated on."""
    if not heads.shared_lm_head:
        return None
    lm_head = base_lm_head(base or statistics.base["path"])
    check_fits(heads, lm_head)
    return lm_head.load()
