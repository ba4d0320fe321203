"""`medusa-quant evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .options import JsonOption, MinAcceptanceOption, MinAgreementOption, SourceArgument
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..calibration import Report


def evaluate(
    heads: SourceArgument,
    calibration: Annotated[str, typer.Option(help="Statistics with held-out states (`calibrate`).")],
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The heads these were made from, to compare with."),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The base whose LM matrix shared heads use. [the one calibrated on]"),
    ] = None,
    min_agreement: MinAgreementOption = None,
    min_acceptance_ratio: MinAcceptanceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Per head: error of the logits, KL, agreement with the source, accuracy on the base's own tokens; and
    the acceptance length the default tree would have."""
    from ..calibration import Statistics, held_out
    from ..calibration.calibrated import judge, shared_lm_matrix
    from ..calibration.gate import Gate
    from ..checkpoints import load_heads
    from ..checkpoints.base import base_lm_head, with_own_lm_heads
    from ..errors import InputError

    gate = Gate(min_agreement, min_acceptance_ratio)
    if source is None and (min_agreement is not None or min_acceptance_ratio is not None):
        raise InputError("the gate compares with the heads these were made from", fix="pass --source HEADS")
    statistics, judged = Statistics.load(calibration), load_heads(heads)
    statistics.check_fits(judged.hidden_size, None, heads)
    original = None if source is None else load_heads(source)
    if original is not None and original.shared_lm_head and not judged.shared_lm_head:
        original = with_own_lm_heads(original, base_lm_head(base or statistics.base["path"]))
    shared = shared_lm_matrix(judged, base, statistics)
    report = judge(judged, held_out(statistics, judged.num_heads), original, shared)
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    gate.check(report, heads)


def print_report(report: Report) -> None:
    """The table of an evaluation, one row a head, and the predicted acceptance."""
    from ..calibration.gate import COLUMNS, summary_line, table_rows

    print_table("held-out states", COLUMNS, table_rows(report), right=" ".join(COLUMNS))
    typer.echo(summary_line(report))
