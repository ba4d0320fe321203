"""GPTQ (Frantar et al. 2022): each rounding error is compensated by the weights not yet rounded.

Static groups with act-order: scales are chosen on the original weights, so that features can be visited
by falling second moment while group k // group_size stays a fixed rule and no g_idx is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantization.scheme import Scheme
from .hessian import Hessian

# Output rows solved together, always this many (padded with zeros): a row's result must not depend on how
# many rows the matrix has, so that a column shard equals the slice of the whole, bit for bit.
ROW_BLOCK = 1024
# Features whose errors are applied to all later ones in one multiplication.
_FEATURE_BLOCK = 128


def gptq_codes(
    weight: Tensor, hessian: Hessian, scales: Tensor, zeros: Tensor | None, scheme: Scheme
) -> Tensor:
    """Signed codes, int8 [n, K], of up to ROW_BLOCK rows.

    weight: fp32 [n, K]; scales [n, G] as stored; zeros int8 [n, G] or None (see `choose_params`).
    """
    rows, features = weight.shape
    group = torch.arange(features) // scheme.group_width(features)
    order, factor = hessian.order, hessian.factor
    # Features first: every step below then works on contiguous rows of ROW_BLOCK values.
    remaining = weight.new_zeros((features, ROW_BLOCK))
    remaining[:, :rows] = weight.t()[order]
    scale = weight.new_ones((scales.shape[1], ROW_BLOCK))
    scale[:, :rows] = scales.float().t()
    zero = weight.new_zeros(scale.shape)
    if zeros is not None:
        zero[:, :rows] = zeros.float().t()
    group_of = group[order].tolist()
    low, high = scheme.code_range
    codes = torch.empty((features, ROW_BLOCK), dtype=torch.int8)
    for start in range(0, features, _FEATURE_BLOCK):
        stop = min(start + _FEATURE_BLOCK, features)
        errors = weight.new_empty((stop - start, ROW_BLOCK))
        for k in range(start, stop):
            s, z = scale[group_of[k]], zero[group_of[k]]
            code = torch.div(remaining[k], s).round_().add_(z).clamp_(low, high)
            codes[k] = code.to(torch.int8)
            error = torch.sub(remaining[k], code.sub_(z).mul_(s)).div_(factor[k, k])
            errors[k - start] = error
            # Two roundings, not a fused multiply-add: the same in vector and in scalar code.
            remaining[k + 1 : stop] -= torch.mul(factor[k, k + 1 : stop, None], error)
        remaining[stop:] -= factor[start:stop, stop:].t() @ errors
    result = torch.empty_like(codes)
    result[order] = codes
    return result[:, :rows].t()
