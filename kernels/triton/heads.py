"""What a user calls: checked arguments, one or many heads, over the operators."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import MAX_TOP_K
from .ops import triton_gemm, triton_top_k
from .weight import TritonWeight

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dequant_gemm(
    x: Tensor,
    weight: TritonWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual + act(x @ w + bias)` with fp32 accumulation, all heads in one launch.

    x: fp16, bf16 or fp32; [M, K] shared by the heads, or [heads, M, K]. Any strides, M may be 0.
    bias: [N] for one head, else [heads, N]. residual: the result's shape. activation: None or "silu".
    Returns [M, N] for a 2-D x and one head, else [heads, M, N], in x's dtype.
    Raises ValueError for arguments that do not fit.
    """
    single = x.ndim == 2 and weight.heads == 1
    shape = (x.shape[-2], weight.out_features) if single else (weight.heads, x.shape[-2], weight.out_features)
    _check_x(x, weight)
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    if bias is not None and bias.numel() != weight.heads * weight.out_features:
        raise ValueError(f"bias must be [{weight.heads}, {weight.out_features}], got {list(bias.shape)}")
    if residual is not None and tuple(residual.shape) != shape:
        raise ValueError(f"residual must be {list(shape)}, got {list(residual.shape)}")
    out = triton_gemm(
        x[None] if x.ndim == 2 else x,
        weight.qweight,
        weight.scales,
        weight.zeros,
        weight.table,
        None if bias is None else bias.reshape(weight.heads, weight.out_features),
        residual[None] if residual is not None and single else residual,
        weight.kind,
        weight.group_size,
        activation == "silu",
    )
    return out[0] if single else out


def top_k(x: Tensor, weight: TritonWeight, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of x @ w and their columns, without storing the logits.

    x as in `dequant_gemm`. Returns values fp32 and columns int64, [M, count] or [heads, M, count], best
    first and the lowest column first among equals. Raises ValueError unless 1 <= count <= min(32, N).
    """
    _check_x(x, weight)
    if not 1 <= count <= min(MAX_TOP_K, weight.out_features):
        raise ValueError(f"top-k must lie in [1, {min(MAX_TOP_K, weight.out_features)}], got {count}")
    values, columns = triton_top_k(
        x[None] if x.ndim == 2 else x,
        weight.qweight,
        weight.scales,
        weight.zeros,
        weight.table,
        weight.kind,
        weight.group_size,
        count,
    )
    if x.ndim == 2 and weight.heads == 1:
        return values[0], columns[0]
    return values, columns


def _check_x(x: Tensor, weight: TritonWeight) -> None:
    features = weight.in_features
    if x.dtype not in _DTYPES:
        raise ValueError(f"x must be fp16, bf16 or fp32, got {x.dtype}")
    if (
        x.ndim not in (2, 3)
        or x.shape[-1] != features
        or (x.ndim == 3 and x.shape[0] not in (1, weight.heads))
    ):
        raise ValueError(f"x must be [M, {features}] or [{weight.heads}, M, {features}], got {list(x.shape)}")
