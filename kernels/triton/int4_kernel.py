"""GEMM over interleaved nibbles (int4, nf4), all heads in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import finish, int4_offset, int4_values, load_rows, store_tile, store_top


@triton.jit(do_not_specialize=["M", "GROUPS"])
def int4_gemm(
    x, qweight, scales, zeros, table, bias, residual, out, indices,
    M, N, K, GROUPS,
    stride_xh, stride_xm, stride_xk, stride_wh, stride_wk, stride_sh, stride_rh, stride_rm,
    GROUP: tl.constexpr, SPAN: tl.constexpr, SILU: tl.constexpr, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[h, m, n] = residual + act(x @ w + bias); grid (tiles of M, tiles of N, heads * SPLIT_K).

    SPLIT_K > 1: out is fp32 [SPLIT_K, heads, M, N] partial sums, without epilogue.
    TOP_K > 0: out and indices are [heads, M, tiles of N * TOP_K] instead of the logits.
    """
    head = (tl.program_id(2) // SPLIT_K).to(tl.int64)
    part = tl.program_id(2) % SPLIT_K
    heads = tl.num_programs(2) // SPLIT_K
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, 16)
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
    blocks = tl.cdiv(K, 128)
    per_part = tl.cdiv(blocks, SPLIT_K)
    symmetric = int4_offset(tl.zeros([BLOCK_N], dtype=tl.int8), DTYPE)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for block in range(part * per_part, tl.minimum((part + 1) * per_part, blocks)):
        tile = qweight + block * 16 * wide_stride
        words = tl.load(tile + word[:, None] * stride_wk + column[None, :], mask=in_row[None, :], other=0)
        for span in tl.static_range(128 // SPAN):
            # A padded row's group may lie beyond the last; its x is 0, any finite scale will do.
            group = tl.minimum((block * 128 + span * SPAN) // GROUP, GROUPS - 1)
            at = group * wide_n + column
            scale = tl.load(scales + at, mask=in_row, other=0.0).to(tl.float32)
            zero = symmetric
            if zeros is not None:
                zero = int4_offset(tl.load(zeros + at, mask=in_row, other=0), DTYPE)
            partial = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for step in tl.static_range(SPAN // 16):
                nibble = (words >> ((span * (SPAN // 16) + step) * 4)) & 15
                if table is not None:
                    value = tl.load(table + nibble).to(DTYPE)
                else:
                    value = int4_values(nibble, zero[None, :], DTYPE)
                feature = block * 128 + span * SPAN + step * 16 + word
                rows = load_rows(x, row, feature, stride_xm, stride_xk, M, K)
                partial = tl.dot(rows, value, partial, input_precision="ieee")
            acc += partial * scale[None, :]

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
