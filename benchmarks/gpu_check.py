"""Correctness on a GPU: every form, dtype, bucket of M and epilogue against fp64 of the same codes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu_shapes import FORMS, Form, Shape, dense, random_weight

from medusa_quant.kernels.triton.heads import dequant_gemm, top_k
from medusa_quant.kernels.triton.weight import TritonWeight

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}
HALVES = (torch.float16, torch.bfloat16)
EVERY_BUCKET = (0, 1, 16, 17, 33, 64, 70, 256)
# Few combinations of shape and dtype, because each compiles its own kernels: about a hundred in all.
CASES = (
    (Shape("aligned", 2, 512, 384), HALVES, EVERY_BUCKET),
    (Shape("ragged", 3, 576, 333), (torch.float16, torch.float32), (3,)),
    (Shape("split-K", 1, 4096, 96), HALVES, (1, 3)),
)


def main() -> int:
    """Print one line a failure and a count; returns the number of failures."""
    torch.manual_seed(0)
    failures = total = 0
    for (shape, dtypes, row_counts), form in itertools.product(CASES, FORMS):
        weight = random_weight(shape, form, "cuda")
        values = dense(weight, torch.float64)
        for dtype, rows in itertools.product(dtypes, row_counts):
            for name, found, wanted in _results(shape, weight, values, dtype, rows):
                total += 1
                error = float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
                # Not `error > limit`: a NaN must fail.
                if not error <= TOLERANCE[dtype]:
                    failures += 1
                    print(f"FAIL {shape.name} {form.name} {dtype} M={rows} {name}: {error:.2e}")
    failures += _invariance() + _graph()
    print(f"correctness: {total} comparisons, a row-invariance and a CUDA-graph check, {failures} failures")
    return failures


def _results(
    shape: Shape, weight: TritonWeight, values: torch.Tensor, dtype: torch.dtype, rows: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, found, wanted) of the ResBlock epilogue and of top-k."""
    x = torch.randn(shape.heads, rows, shape.K, device="cuda").to(dtype)
    bias = torch.randn(shape.heads, shape.N, device="cuda")
    residual = torch.randn(shape.heads, rows, shape.N, device="cuda").to(dtype)
    if weight.heads == 1:
        bias = bias[0]
    if weight.table is not None:
        # The kernel rounds table values to x's dtype; the scales stay in fp32.
        rounded = replace(weight, table=weight.table.to(dtype).float())
        values = dense(rounded, torch.float64)
    logits = x.double() @ values
    wanted = torch.nn.functional.silu(logits + bias.double().view(shape.heads, 1, -1)) + residual.double()
    yield "resblock", dequant_gemm(x, weight, bias, "silu", residual), wanted
    yield "top-k", *_top_logits(x, weight, logits)


def _top_logits(
    x: torch.Tensor, weight: TritonWeight, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the columns chosen, which must be as large as the true top ones (near-ties may swap)."""
    _, columns = top_k(x, weight, 10)
    return logits.gather(-1, columns), logits.topk(10).values


def _invariance() -> int:
    """Rows must not depend on their neighbours within a bucket of M."""
    weight = random_weight(Shape("long", 1, 4096, 512), Form("int4", "int4", 128), "cuda")
    x = torch.randn(16, 4096, device="cuda").half()
    together = dequant_gemm(x, weight)
    same = all(torch.equal(dequant_gemm(x[row : row + 1], weight)[0], together[row]) for row in range(16))
    if not same:
        print("FAIL a row's result depends on M within a bucket")
    return int(not same)


def _graph() -> int:
    """A captured graph replays on new input."""
    weight = random_weight(Shape("small", 2, 512, 384), Form("int4", "int4", 128), "cuda")
    x = torch.randn(4, 512, device="cuda").half()
    dequant_gemm(x, weight), top_k(x, weight, 5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, best = dequant_gemm(x, weight), top_k(x, weight, 5)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(out, dequant_gemm(x, weight)) and torch.equal(best[1], top_k(x, weight, 5)[1])
    if not same:
        print("FAIL a replayed CUDA graph differs from a direct call")
    return int(not same)


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
