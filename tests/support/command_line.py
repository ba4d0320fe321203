"""The command line run in-process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from medusa_quant.cli import main


@dataclass(frozen=True)
class Run:
    """What a command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


RunCli = Callable[..., Run]


def cli_runner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCli:
    """run(*arguments) -> Run, through the same entry point as the installed command."""

    def run(*arguments: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["medusa-quant", *(str(argument) for argument in arguments)])
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        captured = capfd.readouterr()
        return Run(code, captured.out, captured.err)

    return run
