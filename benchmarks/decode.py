"""One pass of the base at growing rows, beside reading its weights once: how far decoding is from its floor.

    python benchmarks/decode.py BASE [--base-dtype int8] [--base-activation int8]

Whole texts with and without heads, beside other programs: `medusa-quant compare`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from medusa_quant.kernels.timing import read_bandwidth
from medusa_quant.runtime.model import Segment, load_base


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("--base-dtype", default="int8")
    parser.add_argument("--base-activation", default="int8")
    args = parser.parse_args()
    base = load_base(args.base, args.base_dtype, activation=args.base_activation)
    linears = [linear for layer in base.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    size = sum(linear.nbytes for linear in linears) + base.lm_head.nbytes
    bandwidth = read_bandwidth(torch.device("cpu"))
    floor = size / bandwidth * 1e3
    print(
        f"weights {size / 1e6:.1f} MB, read bandwidth {bandwidth / 1e9:.1f} GB/s, "
        f"floor {floor:.2f} ms a pass, {torch.get_num_threads()} threads"
    )
    print("\n| rows | ms a pass | of which LM matrix | times the floor |\n|---:|---:|---:|---:|")
    cache = base.new_cache(1, 512)
    for rows in (1, 2, 3, 5, 8, 16, 32):
        tokens, places = torch.full((rows,), 100), torch.arange(100, 100 + rows)

        def layers(tokens: Any = tokens, places: Any = places, rows: int = rows) -> Any:
            return base.forward(tokens, places, [Segment(0, 100, rows)], cache)

        hidden = layers()
        first, second = _median(layers), _median(lambda hidden=hidden: base.logits(hidden))
        print(f"| {rows} | {first + second:.2f} | {second:.2f} | {(first + second) / floor:.2f} |")


def _median(run: Callable[[], Any], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
