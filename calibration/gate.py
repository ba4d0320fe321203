"""The quality gate: when quantized heads are too far from their source to take its place."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import GateError, InputError
from ..runtime.tree import named_tree
from .acceptance import Tree
from .evaluation import TOP_K, Report

COLUMNS = ("head", "error", "KL", *(f"agree@{k}" for k in TOP_K), *(f"accuracy@{k} (source)" for k in TOP_K))


@dataclass(frozen=True)
class Gate:
    """min_agreement: lowest top-1 agreement any head may have. min_acceptance_ratio: lowest predicted
    acceptance length, as a share of the source's. None: not asked for."""

    min_agreement: float | None = None
    min_acceptance_ratio: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_agreement", "min_acceptance_ratio"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"bad {flag}", expected="a share from 0 to 1", found=value)

    def failures(self, report: Report) -> list[str]:
        """One line for each limit the report falls below; [] if all is well."""
        failures = []
        for score in report.heads:
            if self.min_agreement is not None and score.agreement is not None:
                found = score.agreement[1]
                # Written so that NaN fails.
                if not found >= self.min_agreement:
                    failures.append(
                        f"head {score.head}: top-1 agreement {found:.3f} is below {self.min_agreement:g}"
                    )
        ratio = report.acceptance_ratio
        if (
            self.min_acceptance_ratio is not None
            and ratio is not None
            and not ratio >= self.min_acceptance_ratio
        ):
            failures.append(
                f"predicted acceptance length {report.acceptance:.3f} is {ratio:.1%} of the source's, "
                f"below {self.min_acceptance_ratio:.1%}"
            )
        return failures

    def check(self, report: Report, what: str) -> None:
        """Raise GateError naming every limit missed."""
        failures = self.failures(report)
        if failures:
            raise GateError(f"{what}: {'; '.join(failures)}")


def draft_tree(num_heads: int) -> Tree:
    """The tree the runtime uses by default for this many heads."""
    return named_tree("default", num_heads).choices


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """One row of text a head, as COLUMNS; `-` where nothing was compared."""
    rows = []
    for score in report.heads:
        row = [str(score.head), _number(score.output_error, ".4f"), _number(score.kl, ".4f")]
        row += [_number(None if score.agreement is None else score.agreement[k], ".3f") for k in TOP_K]
        for k in TOP_K:
            source = "" if score.source_accuracy is None else f" ({score.source_accuracy[k]:.3f})"
            row.append(f"{score.accuracy[k]:.3f}{source}")
        rows.append(tuple(row))
    return rows


def summary_line(report: Report) -> str:
    """Predicted acceptance in one line."""
    line = f"predicted acceptance length {report.acceptance:.3f} ({report.tree_nodes}-node tree"
    line += f", {report.states} held-out states)"
    if report.acceptance_ratio is not None:
        line += f", {report.acceptance_ratio:.2%} of the source's {report.source_acceptance:.3f}"
    return line


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
