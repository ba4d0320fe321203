"""Options several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SourceArgument = Annotated[
    str, typer.Argument(help="Checkpoint: a file, a folder, a Hugging Face repo id, or a converted folder.")
]
FolderArgument = Annotated[Path, typer.Argument(help="A folder written by `medusa-quant convert`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace an earlier conversion; other tools' files are kept.")
]
