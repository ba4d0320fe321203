"""Runs the interpreted_*.py files in processes of their own: TRITON_INTERPRET is read on import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["interpreted_gemm.py", "interpreted_top_k.py"])
def test_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
