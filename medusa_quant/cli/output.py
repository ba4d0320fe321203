"""How commands print: tables and notes for people, JSON for programs, progress only on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

notes = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(content: object) -> None:
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], right: str = ""
) -> None:
    """right: names of columns to align right, separated by spaces."""
    aligned = right.split()
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(highlight=False)
    # Piped output must not be cut to an assumed 80 columns.
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)


def print_warnings(warnings: Sequence[str]) -> None:
    for warning in dict.fromkeys(warnings):
        notes.print("[yellow]warning:[/]", escape(warning))


@contextmanager
def byte_progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar with bytes and ETA on a terminal; None (silence) otherwise."""
    if not notes.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield update


@contextmanager
def count_progress() -> Iterator[Callable[[int, int | None, str], None]]:
    """Done, time left and what is being done, on a terminal; silence otherwise."""
    if not notes.is_terminal:
        yield lambda done, total, what: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int | None, what: str) -> None:
            bar.update(task, completed=done, total=total, description=escape(what))

        yield update


def size(count: int) -> str:
    """Bytes in MB (10^6), as the field counts checkpoints."""
    return f"{count / 1e6:,.2f} MB"
