"""Device functions the GEMM kernels share: decoding nibbles, reading x, finishing a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int4_values(nibble, zero, DTYPE: tl.constexpr):
    """Codes minus zero of nibbles (code + 8), exact, without an int-to-float conversion.

    fp16 0x6400 is 1024 and bf16 0x4300 is 128, both with a unit in the last place of at most 1: or-ing the
    nibble into the mantissa adds it, and subtracting (offset + 8 + zero) is exact (Kim et al. 2022,
    "Who says elephants can't run"). `zero` is a row [1, N] of DTYPE holding that offset already.
    """
    if tl.float16 == DTYPE:
        return (nibble | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - zero
    elif tl.bfloat16 == DTYPE:
        return (nibble | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True) - zero
    else:
        return (nibble | 0x4B000000).to(tl.float32, bitcast=True) - zero


@triton.jit
def int4_offset(zero_code, DTYPE: tl.constexpr):
    """The value `int4_values` subtracts for zero points int8 (signed codes), built the same way."""
    nibble = (zero_code.to(tl.int32) + 8) & 15
    if tl.float16 == DTYPE:
        return (nibble | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
    elif tl.bfloat16 == DTYPE:
        return (nibble | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return (nibble | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def int8_values(code, DTYPE: tl.constexpr):
    """int8 codes as DTYPE, exact in each (bf16 has the 8 significant bits a code needs).

    fp16 0x6400 + (code + 128) is 1024 + 128 + code, without an int-to-float conversion. bf16's mantissa is
    too short for that; the compiler's own conversion stands.
    """
    if tl.float16 == DTYPE:
        biased = (code ^ -128).to(tl.uint8, bitcast=True).to(tl.uint16) | 0x6400
        return biased.to(tl.float16, bitcast=True) - 1152.0
    else:
        return code.to(DTYPE)


@triton.jit
def load_rows(x, row, column, stride_m, stride_k, M, K):
    """x[row, column] as a tile, 0 outside [M, K]."""
    inside = (row < M)[:, None] & (column < K)[None, :]
    offset = row.to(tl.int64)[:, None] * stride_m + column[None, :] * stride_k
    return tl.load(x + offset, mask=inside, other=0.0)


@triton.jit
def finish(acc, bias, residual, head, row, column, M, N, stride_rh, stride_rm, SILU: tl.constexpr):
    """residual + act(acc + bias) in fp32, for bias [heads, N] or None, residual [heads, M, N] or None."""
    if bias is not None:
        acc += tl.load(bias + head * N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    if residual is not None:
        inside = (row < M)[:, None] & (column < N)[None, :]
        offset = head * stride_rh + row.to(tl.int64)[:, None] * stride_rm + column[None, :]
        acc += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def store_tile(out, acc, row, column, M, N):
    """Write a tile of out [M, N], contiguous."""
    inside = (row < M)[:, None] & (column < N)[None, :]
    offset = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_top(values, indices, acc, row, column, M, N, slot, stride_m, TOP_K: tl.constexpr):
    """Write the TOP_K largest of each row of a tile, in order, the lowest column first among equals.

    values fp32 and indices int32 [M, stride_m]; this tile owns columns slot to slot + TOP_K - 1.
    """
    acc = tl.where((column < N)[None, :], acc, float("-inf"))
    place = row.to(tl.int64) * stride_m + slot
    local = tl.arange(0, acc.shape[1])
    for rank in tl.static_range(TOP_K):
        best, where = tl.max(acc, axis=1, return_indices=True)
        chosen = local[None, :] == where[:, None]
        tl.store(values + place + rank, best, mask=row < M)
        tl.store(indices + place + rank, tl.min(column, axis=0) + where, mask=row < M)
        acc = tl.where(chosen, float("-inf"), acc)
