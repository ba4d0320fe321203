"""Timing on a GPU: CUDA graphs over rotated weights, next to dense fp16 and the measured bandwidth."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from gpu_shapes import FORMS, ROWS, SHAPES, Shape, dense, random_weight

from medusa_quant.kernels.triton.heads import dequant_gemm, top_k

_CACHE_BYTES = 256 << 20  # copies together exceed any last-level cache, so that each read is from memory
_SAMPLES = 15


def graph_time(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one call, the calls captured in one CUDA graph and replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(_SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second of summing 2 GiB."""
    buffer = torch.ones(1 << 29, device="cuda")
    return buffer.nbytes / graph_time([buffer.sum])


def rows_of_table(shape: Shape, bandwidth: float, deadline: float) -> list[str]:
    """Markdown rows: shape, form, M, microseconds, ratio to the floor, speed-up over dense fp16, top-k."""
    lines = []
    baseline: dict[int, float] = {}
    for form in FORMS:
        weight = random_weight(shape, form, "cuda")
        copies = [weight] + [random_weight(shape, form, "cuda") for _ in range(_CACHE_BYTES // weight.nbytes)]
        if not baseline:
            matrices = [dense(weight, torch.float16)]
            matrices += [matrices[0].clone() for _ in range(_CACHE_BYTES // matrices[0].nbytes)]
            for rows in ROWS:
                x = _inputs(shape, rows)
                baseline[rows] = graph_time([partial(torch.matmul, x, matrix) for matrix in matrices])
            del matrices
        for rows in ROWS:
            if time.monotonic() > deadline:
                lines.append(f"| {shape.name} | {form.name} | {rows} | not run: out of time | | | |")
                continue
            x = _inputs(shape, rows)
            seconds = graph_time([partial(dequant_gemm, x, copy) for copy in copies])
            fused = graph_time([partial(top_k, x, copy, 10) for copy in copies])
            floor = weight.nbytes / bandwidth
            lines.append(
                f"| {shape.name} | {form.name} | {rows} | {seconds * 1e6:.1f} | {seconds / floor:.2f} "
                f"| {baseline[rows] / seconds:.2f} | {fused * 1e6:.1f} |"
            )
    return lines


def table(seconds: float) -> str:
    """The whole table as Markdown, within about this many seconds."""
    deadline = time.monotonic() + seconds
    bandwidth = read_bandwidth()
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    lines = [
        f"Device: {torch.cuda.get_device_name()}, {versions}, Python {platform.python_version()}. "
        f"Measured read bandwidth: {bandwidth / 1e9:.0f} GB/s.",
        "",
        "| shape | weight | M | us | x floor | x faster than fp16 | us with fused top-10 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        lines += rows_of_table(shape, bandwidth, deadline)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    arguments = parser.parse_args()
    text = table(arguments.seconds)
    arguments.output.write_text(text)
    print(text)


def _inputs(shape: Shape, rows: int) -> torch.Tensor:
    return torch.randn(shape.heads, rows, shape.K, device="cuda").half()


if __name__ == "__main__":
    main()
