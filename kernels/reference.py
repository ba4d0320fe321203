"""What every backend is held to: the dequant-GEMM in plain torch, accumulated in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..quantization import QuantizedWeight

ACTIVATIONS = (None, "silu")


def dequant_gemm(
    x: Tensor,
    weight: QuantizedWeight | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual + act(x @ w + bias)`, computed in fp32 and rounded once to x's dtype.

    x: fp32, fp16 or bf16 [M, K], any strides, M may be 0.
    weight: QuantizedWeight of K x N, or a float matrix [N, K] (out, in).
    bias: float [N] or None. residual: float [M, N] or None. activation: None or "silu".
    Returns [M, N] in x's dtype. Raises ValueError for shapes that do not belong together.
    """
    check_arguments(x, weight_shape(weight), bias, activation, residual)
    if isinstance(weight, QuantizedWeight):
        out = x.float() @ weight.dequantize()
    else:
        out = x.float() @ weight.float().t()
    if bias is not None:
        out += bias.float()
    if activation == "silu":
        out = F.silu(out)
    if residual is not None:
        out += residual.float()
    return out.to(x.dtype)


def weight_shape(weight: QuantizedWeight | Tensor) -> tuple[int, int]:
    """(K, N) of either kind of weight."""
    if isinstance(weight, QuantizedWeight):
        return weight.shape
    return int(weight.shape[1]), int(weight.shape[0])


def check_arguments(
    x: Tensor,
    shape: tuple[int, int],
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> None:
    """Raise ValueError, naming the argument, unless x, bias and residual fit a K x N weight."""
    features, outputs = shape
    if x.ndim != 2 or x.shape[1] != features:
        raise ValueError(f"x must be [M, {features}], got {list(x.shape)}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x must be fp32, fp16 or bf16, got {x.dtype}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias must be [{outputs}], got {list(bias.shape)}")
    if residual is not None and residual.shape != (x.shape[0], outputs):
        raise ValueError(f"residual must be [{x.shape[0]}, {outputs}], got {list(residual.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
