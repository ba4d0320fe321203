"""The command line. One file a command; a command's module is imported only when it is run."""

from __future__ import annotations

import sys
from importlib import import_module

import click
import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import MedusaQuantError

# Command name -> (module holding a function of the same name, one-line help).
COMMANDS = {
    "convert": ("convert", "Convert a Medusa checkpoint to verified rank files in the chosen dtype."),
    "inspect": ("inspect", "Show what a checkpoint or converted folder holds, per head."),
    "verify": ("verify", "Check a converted folder against its manifest, and against its source."),
    "export": ("export", "Write a converted folder in another layout, without re-quantizing."),
}


class LazyGroup(TyperGroup):
    """Lists every command without importing any: `--help` must not pay for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if ctx.resilient_parsing or not _is_run(cmd_name):
            return click.Command(cmd_name, help=summary)
        function = getattr(import_module(f".{module}", __name__), module)
        single = typer.Typer(add_completion=False)
        single.command(name=cmd_name, help=summary + "\n\n" + (function.__doc__ or ""))(function)
        return typer.main.get_command(single)


def _is_run(name: str) -> bool:
    return name in sys.argv[1:]
