"""GEMM over int8 codes as they are stored ([K, N]), all heads in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import finish, int8_values, load_rows, store_tile, store_top


@triton.jit(do_not_specialize=["M", "GROUPS"])
def int8_gemm(
    x, qweight, scales, zeros, table, bias, residual, out, indices,
    M, N, K, GROUPS,
    stride_xh, stride_xm, stride_xk, stride_wh, stride_wk, stride_sh, stride_rh, stride_rm,
    GROUP: tl.constexpr, SPAN: tl.constexpr, SILU: tl.constexpr, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `int4_gemm`, same arguments and grid; SPAN rows, which share a scale, are one step (no table)."""
    head = (tl.program_id(2) // SPLIT_K).to(tl.int64)
    part = tl.program_id(2) % SPLIT_K
    heads = tl.num_programs(2) // SPLIT_K
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.arange(0, SPAN)
    in_row = column < N
    DTYPE: tl.constexpr = x.dtype.element_ty
    # int64: a matrix may hold more than 2^31 codes.
    wide_stride = tl.cast(stride_wk, tl.int64)
    wide_n = tl.cast(N, tl.int64)

    x += head * stride_xh
    qweight += head * stride_wh
    scales += head * stride_sh
    if zeros is not None:
        zeros += head * stride_sh
    steps = tl.cdiv(K, SPAN)
    per_part = tl.cdiv(steps, SPLIT_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(part * per_part, tl.minimum((part + 1) * per_part, steps)):
        feature = step * SPAN + within
        tile = qweight + step * SPAN * wide_stride
        inside = (feature < K)[:, None] & in_row[None, :]
        codes = tl.load(tile + within[:, None] * stride_wk + column[None, :], mask=inside, other=0)
        at = step * SPAN // GROUP * wide_n + column
        value = int8_values(codes, DTYPE)
        if zeros is not None:
            # In [-255, 255], so exact in bf16 too.
            value -= int8_values(tl.load(zeros + at, mask=in_row, other=0), DTYPE)[None, :]
        rows = load_rows(x, row, feature, stride_xm, stride_xk, M, K)
        partial = tl.dot(rows, value, input_precision="ieee")
        acc += partial * tl.load(scales + at, mask=in_row, other=0.0).to(tl.float32)[None, :]

    if SPLIT_K > 1:
        store_tile(out + (part * heads + head) * M * N, acc, row, column, M, N)
    else:
        acc = finish(acc, bias, residual, head, row, column, M, N, stride_rh, stride_rm, SILU)
        if TOP_K > 0:
            width = tl.num_programs(1) * TOP_K
            place = head * M * width
            store_top(
                out + place, indices + place, acc, row, column, M, N, tl.program_id(1) * TOP_K, width, TOP_K
            )
        else:
            store_tile(out + head * M * N, acc, row, column, M, N)
