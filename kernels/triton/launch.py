"""Launching the kernels on buffers the caller allocated."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .config import Config, architecture, gemm_config
from .int4_kernel import int4_gemm
from .int8_kernel import int8_gemm
from .second_stage import merge_top, sum_parts
from .weight import TritonWeight, scale_span

# Scalar fp32 products of a longer step do not fit in registers.
_FP32_SPAN = 32
_ONE_GROUP = 1 << 30  # a group no K reaches: its index is always 0
SUM_TILE = (8, 256)  # rows, columns


def launch_gemm(
    x: Tensor,
    weight: TritonWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    residual: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    """out [heads, M, N] = residual + act(x @ w + bias).

    x: [heads, M, K], any strides (0 along heads where heads share it). bias: [heads, N] contiguous.
    residual: [heads, M, N], contiguous along N. parts: fp32 [SPLIT_K, heads, M, N] for split-K, or None.
    """
    heads, rows, outputs = out.shape
    config = gemm_config(architecture(x.device), rows, x.dtype)
    if parts is None:
        _gemm(x, weight, out, None, config, 1, 0, bias, residual, silu)
        return
    _gemm(x, weight, parts, None, config, parts.shape[0], 0)
    tile_m, tile_n = SUM_TILE
    grid = (triton.cdiv(rows, tile_m), triton.cdiv(outputs, tile_n), heads)
    sum_parts[grid](
        parts, bias, residual, out, rows, outputs, *_residual_strides(residual),
        SILU=silu, SPLIT_K=parts.shape[0], BLOCK_M=tile_m, BLOCK_N=tile_n,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def launch_top_k(
    x: Tensor, weight: TritonWeight, candidates: tuple[Tensor, Tensor], top: tuple[Tensor, Tensor]
) -> None:
    """Top-k of x @ w without storing it: candidates (fp32, int32) [heads, M, tiles * k] are scratch of
    `candidate_width` columns, top (fp32, int64) [heads, M, k] the result. x as in `launch_gemm`."""
    values, indices = candidates
    heads, rows, count = top[0].shape
    config = gemm_config(architecture(x.device), rows, x.dtype)
    _gemm(x, weight, values, indices, config, 1, count)
    width = values.shape[2]
    block = triton.next_power_of_2(width)
    merge_top[(heads * rows,)](
        values, indices, *top, width, TOP_K=count, BLOCK=block,
        num_warps=merge_warps(block), enable_fp_fusion=True,
    )  # fmt: skip


def candidate_width(x: Tensor, outputs: int, count: int) -> int:
    """Columns of `launch_top_k`'s scratch for x [heads, M, K]: k for each tile of N."""
    return triton.cdiv(outputs, gemm_config(architecture(x.device), x.shape[1], x.dtype).block_n) * count


def merge_warps(block: int) -> int:
    """Warps of `merge_top`: at most 32 candidates a thread, as far as that goes."""
    return min(16, max(4, block // 1024))


def kernel_of(kind: str) -> Any:
    """The GEMM kernel for a TritonWeight's kind."""
    return int8_gemm if kind == "int8" else int4_gemm


def group_constants(group_size: int, dtype: torch.dtype) -> dict[str, int]:
    """GROUP and SPAN of the kernels for a weight's group size (-1: one scale per output channel)."""
    span = scale_span(group_size)
    if dtype == torch.float32:
        span = min(span, _FP32_SPAN)
    return {"GROUP": group_size if group_size > 0 else _ONE_GROUP, "SPAN": span}


def _gemm(
    x: Tensor,
    weight: TritonWeight,
    out: Tensor,
    indices: Tensor | None,
    config: Config,
    parts: int,
    top_k: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu: bool = False,
) -> None:
    rows, features = x.shape[1:]
    outputs = weight.out_features
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(outputs, config.block_n), weight.heads * parts)
    kernel_of(weight.kind)[grid](
        x, weight.qweight, weight.scales, weight.zeros, weight.table, bias, residual, out, indices,
        rows, outputs, features, weight.scales.shape[1],
        *x.stride(), weight.qweight.stride(0), weight.qweight.stride(1), weight.scales.stride(0),
        *_residual_strides(residual),
        **group_constants(weight.group_size, x.dtype), SILU=silu, TOP_K=top_k, SPLIT_K=parts,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _residual_strides(residual: Tensor | None) -> tuple[int, int]:
    return (0, 0) if residual is None else (residual.stride(0), residual.stride(1))
