"""Weights and the fp64 oracle of the kernels' tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_quant.quantization import QuantizedWeight

KINDS = ("int4", "int8", "fp32", "fp16", "bf16")


def make_weight(
    kind: str, features: int, outputs: int, group_size: int = -1, symmetric: bool = True, seed: int = 0
) -> QuantizedWeight | Tensor:
    """A random weight of K x N: every code occurs, scales spread over a decade."""
    generator = torch.Generator().manual_seed(seed)
    if not kind.startswith("int"):
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]
        return torch.randn(outputs, features, generator=generator).to(dtype)
    bits = int(kind[3:])
    half = 2 ** (bits - 1)
    width = features if group_size == -1 else group_size
    groups = -(-features // width)
    codes = torch.randint(-half, half, (features, outputs), dtype=torch.int8, generator=generator)
    scales = (10 ** (-2 * torch.rand(groups, outputs, generator=generator)) / half).half()
    zeros = None
    if not symmetric:
        zeros = torch.randint(-half, half, (groups, outputs), dtype=torch.int8, generator=generator)
    return QuantizedWeight.from_codes(codes, scales, bits, group_size, zeros)


def oracle(
    x: Tensor,
    weight: QuantizedWeight | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The contract in fp64 [M, N]."""
    dense = weight.dequantize().double() if isinstance(weight, QuantizedWeight) else weight.double().t()
    out = x.double() @ dense
    if bias is not None:
        out = out + bias.double()
    if activation == "silu":
        out = F.silu(out)
    return out if residual is None else out + residual.double()


def int8_activations(x: Tensor, width: int) -> Tensor:
    """x as the int8 path sees it, fp64: per row and group of `width` features, 127 steps each way."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], width):
        part = x[:, start : start + width].double()
        scale = part.abs().amax(1, keepdim=True) / 127
        out[:, start : start + width] = torch.where(scale > 0, (part / scale).round() * scale, 0.0)
    return out


def relative(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected values; 0 where both are empty.

    Below its smallest normal number a dtype has fewer digits than the limits ask for: what its storage
    alone may round there is not counted.
    """
    if not expected.numel():
        return 0.0
    info = torch.finfo(found.dtype if found.is_floating_point() else torch.float64)
    subnormal = info.tiny * info.eps * expected.numel() ** 0.5
    difference = ((found.double() - expected).norm() - subnormal).clamp(min=0)
    return float(difference / expected.norm().clamp(min=1e-30))


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output buffer in which whatever is not written stays NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)
