"""The plots of a report, as SVG text. matplotlib is imported on use: an extra."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from .settings import PLAIN

_COLORS = ("#0b6e4f", "#2f6db5", "#c8553d", "#8a5aab", "#b8860b", "#4d7c8a", "#a23b72", "#5c5c5c")
_PARTS = (("base", "#9fb8ad"), ("verify", "#d9c48f"), ("heads", "#c8553d"))

Rows = Sequence[dict[str, Any]]


def speedup_by_batch(rows: Rows) -> str:
    """Speed-up over plain decoding: one group of bars a batch size, one bar a row; lines span the repeats."""
    batches = sorted({row["batch"] for row in rows})
    names = _names(rows)
    figure, axes = _figure(max(6.0, 1.2 + 0.42 * len(batches) * (len(names) + 1)))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        here = {row["batch"]: row for row in rows if _name(row) == name}
        found = [(place, here[batch]) for place, batch in enumerate(batches) if batch in here]
        places = [place + (number - (len(names) - 1) / 2) * width for place, _ in found]
        heights = [row["speedup"] for _, row in found]
        spread = [
            [row["speedup"] - row["speedup_min"] for _, row in found],
            [row["speedup_max"] - row["speedup"] for _, row in found],
        ]
        color = _COLORS[number % len(_COLORS)]
        axes.bar(places, heights, width * 0.92, label=name, color=color, yerr=spread, ecolor="#333333")
    axes.axhline(1.0, color="#333333", linewidth=1)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("times plain decoding")
    _legend(axes, len(names))
    return _svg(figure, "speedup")


def acceptance_by_position(rows: Rows) -> str:
    """Share of drafts in which each head's token was accepted, at the smallest batch."""
    figure, axes = _figure()
    batch = min(row["batch"] for row in rows)
    for number, row in enumerate(row for row in rows if row["batch"] == batch):
        shares = row["acceptance_per_position"]
        style = {"color": _COLORS[number % len(_COLORS)], "marker": "o", "markersize": 4}
        axes.plot(range(1, len(shares) + 1), shares, label=_name(row), **style)
    deepest = max(len(row["acceptance_per_position"]) for row in rows)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted share of drafts")
    axes.set_ylim(bottom=0)
    _legend(axes, len(_names(rows)))
    return _svg(figure, "positions")


def step_split(rows: Rows) -> str:
    """Milliseconds of a step spent in the base, in verification and in the heads."""
    figure, axes = _figure(height=max(2.2, 0.5 + 0.3 * len(rows)))
    places = list(range(len(rows)))[::-1]
    left = [0.0] * len(rows)
    for part, color in _PARTS:
        widths = [row[f"{part}_ms_per_step"] for row in rows]
        axes.barh(places, widths, 0.75, left=left, label=part, color=color)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [f"{_name(row)}, batch {row['batch']}" for row in rows])
    axes.set_xlabel("ms a step")
    _legend(axes, len(_PARTS))
    return _svg(figure, "split")


def size_against_acceptance(points: Sequence[tuple[str, float, float]]) -> str:
    """points: (variant, MB a step reads of the heads, predicted acceptance length)."""
    figure, axes = _figure()
    for number, (name, size, length) in enumerate(points):
        axes.scatter([size], [length], color=_COLORS[number % len(_COLORS)], s=45, zorder=3)
        axes.annotate(name, (size, length), xytext=(6, 4), textcoords="offset points", fontsize=9)
    axes.margins(x=0.18, y=0.3)
    axes.set_xlabel("MB of heads a step reads")
    axes.set_ylabel("predicted acceptance length")
    return _svg(figure, "size")


def _name(row: dict[str, Any]) -> str:
    return str(row["variant"]) if row["variant"] == PLAIN else f"{row['variant']}, {row['tree']}"


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(_name(row) for row in rows))


def _figure(width: float = 6.4, height: float = 3.4) -> tuple[Any, Any]:
    import matplotlib

    # The report is read as text: no fonts in paths, and the same bytes for the same numbers.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "medusa-quant", "font.size": 10})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", zorder=0)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Any, entries: int) -> None:
    axes.legend(frameon=False, fontsize=9, ncols=min(entries, 3), loc="lower left", bbox_to_anchor=(0, 1))


def _svg(figure: Any, name: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", text[text.index("<svg") :], count=1)
    # Several plots share a page, and matplotlib numbers the parts of each from 1.
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
