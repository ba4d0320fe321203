"""The command line. One file a command; a command's module is imported only when it is run."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

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
    "calibrate": ("calibrate", "Collect statistics of a base's hidden states over prompts."),
    "evaluate": ("evaluate", "Judge heads on held-out states: error, agreement, predicted acceptance."),
    "train": ("train", "Train heads for a base on its own text, or recover quantized ones."),
    "tree": ("tree", "The draft tree that gains most with these heads, on this machine."),
    "compare": ("compare", "Speed, acceptance, size and quality of heads in several dtypes, side by side."),
    "generate": ("generate", "Write text with a base and draft heads: the base's own, faster."),
    "serve": ("serve", "Serve a base with draft heads behind the OpenAI API."),
    "kernels": ("kernels", "Which kernels this machine has, what each shape would use, and why."),
    "bench-kernels": ("bench_kernels", "Time every kernel backend against its memory floor."),
}


class LazyGroup(TyperGroup):
    """Lists every command without importing any: `--help` must not pay for torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if cmd_name not in sys.argv[1:]:
            return typer.core.TyperCommand(cmd_name, help=summary)
        function = getattr(import_module(f".{module}", __name__), module)
        single = typer.Typer(add_completion=False)
        single.command(name=cmd_name, help=f"{summary}\n\n{function.__doc__ or ''}")(function)
        return typer.main.get_command(single)


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"medusa-quant {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True),
) -> None:
    """Quantized Medusa heads: convert, calibrate, run and measure them."""


def main() -> None:
    """Entry point: one line and an exit code for what a user can cause, a traceback only with --debug."""
    # Unwinding on SIGTERM is what removes half-written folders.
    signal.signal(signal.SIGTERM, _interrupt)
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    # Accepted anywhere, as people append it to the command that failed.
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, standalone_mode=True)
    except MedusaQuantError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is left to tell.
        sys.stderr.close()
        sys.exit(141)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
