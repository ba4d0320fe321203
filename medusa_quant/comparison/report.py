"""`report.html`: one file with its numbers and plots, readable without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import plots
from .results import Results
from .settings import PLAIN

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d1d1d; background: #fff; margin: 0 auto;
  padding: 1.5rem 1rem 4rem; max-width: 68rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p { max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; max-width: 46rem; }
.plots { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
.note { color: #555; font-size: .875rem; }
"""

_COLUMNS = (
    "heads, tree", "batch", "tok/s", "speed-up", "spread", "acceptance", "nodes",
    "base ms", "verify ms", "heads ms", "MB a step", "load s", "peak MB",
)  # fmt: skip


def report_html(results: Results, rows: Sequence[dict[str, Any]]) -> str:
    """The whole page."""
    settings = results.settings
    own = [row for row in rows if "speedup" in row]
    drafted = [row for row in own if row["variant"] != PLAIN]
    points = [
        (name, variant.bytes / 1e6, variant.quality["acceptance_length"])
        for name, variant in results.variants.items()
        if variant.quality
    ]
    figures = [
        ("Speed-up by batch", plots.speedup_by_batch(drafted)),
        ("Acceptance by position", plots.acceptance_by_position(drafted)),
        ("Where a step's time goes", plots.step_split(own)),
    ]
    if points:
        figures.append(("Size against acceptance", plots.size_against_acceptance(points)))
    drawn = "".join(f"<figure><h2>{escape(title)}</h2>{svg}</figure>" for title, svg in figures)
    machine, base = results.machine, Path(settings["base"]).name
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(Path(settings['heads']).name)} on {escape(base)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(Path(settings['heads']).name)} on {escape(base)}</h1>"
        f"<p class='note'>{settings['prompts']} prompts, {settings['tokens']} tokens each, greedy; base "
        f"{escape(settings['base_dtype'])} with {escape(settings['base_activation'])} activations; "
        f"{settings['repeats']} repeats in turn, medians shown. {escape(machine['cpu'])}, "
        f"{machine['threads']} threads, {escape(machine['system'])}, Python {escape(machine['python'])}; "
        f"{escape(', '.join(f'{name} {number}' for name, number in results.versions.items()))}.</p>"
        f"<p>Every row wrote the same text as plain greedy decoding.</p>"
        f"<h2>Speed</h2><div class='wide'>{_table(_COLUMNS, [_cells(row) for row in rows])}</div>"
        f"<div class='plots'>{drawn}</div>"
        f"<h2>Quality against the fp16 heads</h2>{_quality(results)}{_peers(results)}</html>\n"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    name = ", ".join(part for part in (row["variant"], row["tree"]) if part)
    speed = f"{row['tokens_per_second']:.1f}"
    if "speedup" not in row:
        return [name, str(row["batch"]), speed, *["-"] * (len(_COLUMNS) - 3)]
    plain = row["variant"] == PLAIN
    peak = row["peak_memory_bytes"]
    return [
        name,
        str(row["batch"]),
        speed,
        f"{row['speedup']:.2f}",
        f"{row['speedup_min']:.2f} to {row['speedup_max']:.2f}",
        f"{row['acceptance_length']:.3f}",
        f"{row['nodes_per_draft']:.1f}",
        *(f"{row[f'{part}_ms_per_step']:.2f}" for part in ("base", "verify", "heads")),
        "-" if plain else f"{row['bytes'] / 1e6:.1f}",
        "-" if plain else f"{row['load_seconds']:.2f}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
    ]


def _quality(results: Results) -> str:
    columns = (
        "heads",
        "predicted acceptance",
        "of fp16",
        "lowest top-1 agreement",
        "error by head",
        "KL by head",
    )
    rows = []
    for name, variant in results.variants.items():
        quality = variant.quality
        if not quality:
            continue
        scores = quality["heads"]
        rows.append(
            [
                name,
                f"{quality['acceptance_length']:.3f}",
                f"{quality['acceptance_ratio']:.2%}",
                f"{quality['min_agreement']:.3f}",
                " ".join(f"{score['output_error']:.3f}" for score in scores),
                " ".join(f"{score['kl']:.4f}" for score in scores),
            ]
        )
    return f"<div class='wide'>{_table(columns, rows)}</div>" if rows else "<p>Not measured.</p>"


def _peers(results: Results) -> str:
    if not results.peers:
        return ""
    said = dict.fromkeys(
        f"{run.peer}, batch {run.batch}: {run.error or run.version}" for run in results.peers
    )
    listed = "".join(f"<li>{escape(line)}</li>" for line in said)
    return f"<h2>Peers</h2><p>Each ran the same prompts in a process of its own.</p><ul>{listed}</ul>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
