"""The load benchmark, small: Poisson arrivals and cancels on a tiny base."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from draft_heads import save_heads

from medusa_quant.checkpoints.base import base_lm_head

LOAD = Path(__file__).resolve().parents[2] / "benchmarks" / "load.py"


def test_no_stream_is_lost_or_mixed_up(tiny_base: Path, tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads", 2, lm_head=base_lm_head(str(tiny_base)).dense(), scale=0.02)
    command = [sys.executable, str(LOAD), str(tiny_base), "--heads", str(heads), "--streams", "24"]
    command += ["--rate", "60", "--tokens", "16", "--requests", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "24 streams: 16 finished, 8 cancelled, each the offline text" in done.stdout
    assert len(re.findall(r"p50 \d+ ms, p99 \d+ ms", done.stdout)) == 2
    memory = [float(size) for size in re.findall(r"\d+ (\d+)(?:,|\n|$)", done.stdout.splitlines()[-1])]
    assert len(memory) == 10
    assert memory[-1] < memory[0] * 1.1
