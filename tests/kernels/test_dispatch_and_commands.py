"""Which backend is picked and why, and the commands that show it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from kernel_cases import make_weight

from medusa_quant.cli import main
from medusa_quant.errors import InputError
from medusa_quant.kernels import prepare
from medusa_quant.kernels.dispatch import BACKEND_VARIABLE, backend_names, unavailable


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["medusa-quant", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_backend_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    assert prepare(make_weight("int4", 64, 32, 32)).backend == "reference"


@pytest.mark.parametrize(("name", "words"), [("cuda", "unknown"), ("torch_native", "no int4 weights")])
def test_a_forced_backend_that_cannot(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, name)
    with pytest.raises(InputError, match=words):
        prepare(make_weight("int4", 64, 32, 32))


def test_integer_weights_run_on_our_kernels_where_there_is_a_compiler() -> None:
    if unavailable("cpu"):
        pytest.skip(str(unavailable("cpu")))
    for kind in ("int4", "int8"):
        for mode in ("exact", "int8"):
            assert prepare(make_weight(kind, 64, 32), activation=mode).backend == "cpu"


def test_kernels_lists_backends_and_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "kernels", "--shape", "64x96", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["backends"]) == set(backend_names())
    for choice in report["choices"]:
        assert choice["why"]
        assert choice["backend"] in choice["cost"]


def test_bench_kernels_checks_and_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--shape", "64x96", "--m", "1,3", "--dtype", "int8", "--json"]
    assert run(monkeypatch, "bench-kernels", *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(result["bandwidth"] > 0 for result in report["results"])
    assert {row["M"] for row in report["results"]} == {1, 3}
    for row in report["results"]:
        assert row["error"] < 2e-2
        assert row["milliseconds"] > 0
        assert row["ratio"] == pytest.approx(row["milliseconds"] / row["floor"])
