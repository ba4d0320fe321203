"""Fixtures of the conversion's tests."""

from __future__ import annotations

import signal

import pytest
from made import RunCli, cli_runner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCli:
    """run(*arguments) -> Run(code, out, err), as a user would type it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return cli_runner(monkeypatch, capfd)
