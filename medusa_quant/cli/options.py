"""Options several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

SourceArgument = Annotated[
    str, typer.Argument(help="Checkpoint: a file, a folder, a Hugging Face repo id, or a converted folder.")
]
FolderArgument = Annotated[Path, typer.Argument(help="A folder written by `medusa-quant convert`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace an earlier conversion; other tools' files are kept.")
]
MinAgreementOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="Exit 3 where a head's top-1 agreement with its source falls below this share."),
]
MinAcceptanceOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="Exit 3 where predicted acceptance falls below this share of the source's."),
]
