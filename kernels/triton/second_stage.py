"""Second stages: summing split-K parts, and merging each tile's top-k."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import finish, store_tile


@triton.jit(do_not_specialize=["M"])
def sum_parts(
    parts, bias, residual, out, M, N, stride_rh, stride_rm,
    SILU: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [heads, M, N] from parts fp32 [SPLIT_K, heads, M, N], always in the same order (no atomics)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(2)
    inside = (row < M)[:, None] & (column < N)[None, :]
    offset = row.to(tl.int64)[:, None] * N + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for part in tl.static_range(SPLIT_K):
        acc += tl.load(parts + (part * heads + head) * M * N + offset, mask=inside, other=0.0)
    acc = finish(acc, bias, residual, head, row, column, M, N, stride_rh, stride_rm, SILU)
    store_tile(out + head * M * N, acc, row, column, M, N)


@triton.jit(do_not_specialize=["width"])
def merge_top(values, indices, top_values, top_indices, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Top TOP_K of each row's candidates [rows, width] (fp32, int32) as [rows, TOP_K] (fp32, int64).

    Candidates of equal value lie in the order of their columns, so the first is the lowest column.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    candidate = tl.load(values + row * width + place, mask=place < width, other=float("-inf"))
    for rank in tl.static_range(TOP_K):
        best, where = tl.max(candidate, axis=0, return_indices=True)
        tl.store(top_values + row * TOP_K + rank, best)
        tl.store(top_indices + row * TOP_K + rank, tl.load(indices + row * width + where).to(tl.int64))
        candidate = tl.where(place == where, float("-inf"), candidate)
