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

BaseArgument = Annotated[str, typer.Argument(help="Base model: a folder, a .gguf file, or a repo id.")]
BaseDtypeOption = Annotated[str, typer.Option(help="fp32, fp16, bf16, int8 or int4.")]
BaseActivationOption = Annotated[
    str, typer.Option(help="Activations before integer weights of the base: int8 or exact.")
]
HeadsActivationOption = Annotated[str, typer.Option(help="The same for the heads.")]
DraftHeadsOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Medusa heads: a checkpoint or a converted folder."),
]
SpeculationOption = Annotated[str, typer.Option(help="auto, tree, chain or off.")]
TreeOption = Annotated[str, typer.Option(help="none, chain, default, deep or a file.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, ...")]
