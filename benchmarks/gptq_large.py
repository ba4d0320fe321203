"""Seconds and peak memory of a GPTQ conversion at a large base's shape, on synthetic heads and states.

    python benchmarks/gptq_large.py [--shape 7b] [--heads 1] [--states 8192]

States have a spectrum that falls as 1/sqrt(i), as hidden states' do roughly; time does not depend on it.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
from convert_33b import SHAPES, make_checkpoint

from medusa_quant import ConvertOptions, load_heads
from medusa_quant.calibration import Statistics
from medusa_quant.calibration.calibrated import convert_calibrated

_HELD_OUT, _LOOKAHEAD = 128, 16


def make_statistics(hidden: int, vocab: int, states: int) -> Statistics:
    generator = torch.Generator().manual_seed(0)
    decay = torch.arange(1, hidden + 1) ** -0.5
    mix = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
    x = (torch.randn(states + _HELD_OUT, hidden, generator=generator) * decay) @ mix
    seen, held = x[:states], x[states:]
    following = torch.randint(0, vocab, (_HELD_OUT, _LOOKAHEAD), generator=generator, dtype=torch.int32)
    top = torch.zeros(_HELD_OUT, 10)
    return Statistics(
        (seen.t() @ seen).double(),
        seen.abs().amax(0),
        seen,
        held,
        following,
        top.int(),
        top,
        states,
        _HELD_OUT,
        2,
        {"path": "synthetic", "hidden_size": hidden, "vocab_size": vocab},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--states", type=int, default=8192)
    args = parser.parse_args()
    _, hidden, vocab = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        source, statistics = Path(folder) / "heads", Path(folder) / "statistics.safetensors"
        make_checkpoint(source, args.heads, hidden, vocab)
        make_statistics(hidden, vocab, args.states).save(statistics)
        for method in ("rtn", "gptq"):
            options = ConvertOptions(dtype="int4", method=method, calibration=str(statistics))
            started = time.perf_counter()
            _, report = convert_calibrated(load_heads(source), Path(folder) / method, options)
            seconds = time.perf_counter() - started
            errors = " ".join(f"{score.output_error:.4f}" for score in report.heads)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{args.heads} heads of H {hidden}, V {vocab}, {method}: {seconds:.0f} s, ", end="")
            print(f"output error {errors}, peak {peak:,.0f} MB so far", flush=True)


if __name__ == "__main__":
    main()
