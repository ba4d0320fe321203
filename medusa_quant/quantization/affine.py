"""The affine map between values and signed codes: `q = clamp(round(w / scale) + zero)`, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .scheme import Scheme


def quantize_groups(
    groups: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, out: Tensor | None = None
) -> Tensor:
    """Codes of grouped weights, rounding half to even.

    groups: fp32 [N, G, g]; scales [N, G] (fp16 or fp32); zeros int8 [N, G] or None. out: receives the
    result where given.
    Returns integral fp32 codes [N, G, g] inside `scheme.code_range`.
    """
    low, high = scheme.code_range
    codes = torch.div(groups, scales.float().unsqueeze(-1), out=out).round_()
    if zeros is not None:
        codes += zeros.float().unsqueeze(-1)
    return codes.clamp_(low, high)


def dequantize_groups(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Values `(q - zero) * scale` in fp32.

    codes: any dtype holding integers [N, G, g]; scales [N, G]; zeros int8 [N, G] or None. out: fp32,
    receives the result where given; may be `codes` itself.
    """
    values = codes.to(torch.float32)
    if zeros is not None:
        values = torch.sub(values, zeros.float().unsqueeze(-1), out=out)
    return torch.mul(values, scales.float().unsqueeze(-1), out=out)


def fake_quantize_groups(groups: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """Quantize and dequantize: fp32 [N, G, g] as the runtime will see it."""
    return dequantize_groups(quantize_groups(groups, scales, zeros, scheme), scales, zeros)
