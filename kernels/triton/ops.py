"""The kernels as torch operators, with fake implementations: torch.compile and CUDA graphs capture them."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import architecture, split_k
from .launch import candidate_width, launch_gemm, launch_top_k
from .weight import TritonWeight


@torch.library.custom_op("medusa_quant::triton_gemm", mutates_args=())
def triton_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    kind: str,
    group_size: int,
    silu: bool,
) -> Tensor:
    """residual + act(x @ w + bias), [heads, M, N] in x's dtype.

    x: [heads or 1, M, K] (1: the heads share it). The weight's parts as in TritonWeight.
    bias: [heads, N] or None. residual: [heads, M, N] or None.
    """
    weight = TritonWeight(kind, qweight, scales, x.shape[2], group_size, zeros, table)
    heads, rows, outputs = weight.heads, x.shape[1], weight.out_features
    out = x.new_empty((heads, rows, outputs))
    if out.numel() == 0:
        return out
    count = split_k(architecture(x.device), heads, outputs, x.shape[2])
    parts = None
    if count > 1:
        parts = x.new_empty((count, heads, rows, outputs), dtype=torch.float32)
    launch_gemm(
        x.expand(heads, -1, -1),
        weight,
        out,
        bias=None if bias is None else bias.contiguous(),
        silu=silu,
        residual=residual if residual is None or residual.stride(2) == 1 else residual.contiguous(),
        parts=parts,
    )
    return out


@triton_gemm.register_fake
def _gemm_fake(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    kind: str,
    group_size: int,
    silu: bool,
) -> Tensor:
    return x.new_empty((qweight.shape[0], x.shape[1], qweight.shape[2]))


@torch.library.custom_op("medusa_quant::triton_top_k", mutates_args=())
def triton_top_k(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    table: Tensor | None,
    kind: str,
    group_size: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The `count` largest of x @ w: values fp32 and columns int64, [heads, M, count], best first.

    Among equals the lowest column comes first. Arguments as in `triton_gemm`.
    """
    weight = TritonWeight(kind, qweight, scales, x.shape[2], group_size, zeros, table)
    heads, rows = weight.heads, x.shape[1]
    values = x.new_empty((heads, rows, count), dtype=torch.float32)
    columns = x.new_empty((heads, rows, count), dtype=torch.int64)
    if values.numel():
        width = candidate_width(x, weight.out_features, count)
        candidates = (
            x.new_empty((heads, rows, width), dtype=torch.float32),
            x.new_empty((heads, rows, width), dtype=torch.int32),
        )
        launch_top_k(x.expand(heads, -1, -1), weight, candidates, (values, columns))
    return values, columns


@triton_top_k.register_fake
def _top_k_fake(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    table: Tensor | None,
    kind: str,
    group_size: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    shape = (qweight.shape[0], x.shape[1], count)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)
