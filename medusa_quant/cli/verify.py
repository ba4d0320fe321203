"""`medusa-quant verify`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .options import FolderArgument, JsonOption
from .output import byte_progress, print_json, print_table, size


def verify(
    folder: FolderArgument,
    against: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The checkpoint it came from: compare every tensor."),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The base whose LM matrix the heads were given. [the manifest's]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Sizes, checksums, missing or extra files, NaN, errors above those recorded; exit code 1 on failure."""
    from ..errors import VerifyError
    from ..verification import verify as run

    with byte_progress() as progress:
        report = run(folder, against, base, progress)
    if as_json:
        print_json(
            {
                "folder": str(report.folder),
                "ok": report.ok,
                "parts": report.files,
                "bytes": report.bytes,
                "failures": report.failures,
                "tensors": report.tensors,
            }
        )
    elif report.tensors:
        rows = [
            (r["tensor"], r["dtype"], f"{r['relative']:.3g}", f"{r['max']:.3g}", "ok" if r["ok"] else "FAIL")
            for r in report.tensors
        ]
        print_table(
            f"against {against}", ("tensor", "dtype", "relative", "max", ""), rows, right="relative max"
        )
    if not report.ok:
        for failure in report.failures:
            typer.echo(failure, err=True)
        raise VerifyError(f"{report.folder}: {len(report.failures)} failures")
    if not as_json:
        typer.echo(f"{report.folder}: ok, {report.files} parts, {size(report.bytes)}")
