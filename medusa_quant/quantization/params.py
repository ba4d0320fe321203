"""Choosing scales and zero points for groups of weights (round-to-nearest range, or MSE clip search)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .affine import fake_quantize_groups
from .scheme import Scheme

# fp32's smallest normal number: a smaller scale would be flushed to zero by some hardware.
_TINY = torch.finfo(torch.float32).tiny
# Clip ratios tried by `mse`; 1.0 comes first, so the result is never worse than `rtn`.
_CLIP_RATIOS = tuple(1.0 - 0.02 * step for step in range(31))


def choose_params(
    groups: Tensor,
    scheme: Scheme,
    method: str = "rtn",
    scale_dtype: torch.dtype = torch.float16,
    error_of: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros for weights already cut into groups.

    groups: fp32 [N, G, g], a short last group padded with zeros (which never changes its range).
    method: `rtn` covers the whole range of a group; `mse` shrinks the range to the clip ratio with
        the least squared error (the grid search of GPTQ's Quantizer, Frantar et al. 2022, with p = 2).
    scale_dtype: the dtype scales will be stored in; they are rounded to it before any code is chosen.
    error_of: for `mse`, what a difference fp32 [N, G, g] costs, [N, G], in place of its squares' sum.

    Returns scales [N, G] in `scale_dtype` and zeros int8 [N, G] (None when symmetric), in the domain
    of signed codes. An all-zero group gets scale 1 and zero 0.
    """
    low, high = groups.amin(-1), groups.amax(-1)  # aminmax along a dimension is ten times slower
    scales, zeros = _range_params(low, high, scheme, scale_dtype)
    if method == "rtn":
        return scales, zeros
    if method != "mse":
        raise ValueError(f"unknown method {method!r}")
    measure = error_of or _sum_of_squares
    best = measure(_difference(groups, scales, zeros, scheme))
    for ratio in _CLIP_RATIOS[1:]:
        trial_scales, trial_zeros = _range_params(low * ratio, high * ratio, scheme, scale_dtype)
        error = measure(_difference(groups, trial_scales, trial_zeros, scheme))
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, trial_scales, scales)
        if zeros is not None and trial_zeros is not None:
            zeros = torch.where(better, trial_zeros, zeros)
    return scales, zeros


def scales_fit(scales: Tensor) -> bool:
    """Whether fp16 can hold these scales without underflow (a subnormal loses precision) or overflow."""
    magnitude = scales.abs()
    fits = (magnitude >= torch.finfo(torch.float16).tiny) & (magnitude <= torch.finfo(torch.float16).max)
    return bool(fits.all())


def _range_params(
    low: Tensor, high: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    code_low, code_high = scheme.code_range
    if scheme.symmetric and scheme.full_range:
        extreme = torch.where(high > -low, high, low)
        scales = _storable(extreme / code_low, scale_dtype)
        return scales, None
    if scheme.symmetric:
        scales = _storable(torch.maximum(high, -low) / code_high, scale_dtype)
        return scales, None
    low, high = low.clamp(max=0), high.clamp(min=0)
    steps = code_high - code_low
    # Divide before subtracting: high - low can overflow fp32 where each alone does not.
    scales = _storable(high / steps - low / steps, scale_dtype)
    zeros = (code_low - torch.round(low / scales.float())).clamp(code_low, code_high)
    empty = (low == 0) & (high == 0)
    return scales, zeros.masked_fill(empty, 0).to(torch.int8)


def _storable(scales: Tensor, dtype: torch.dtype) -> Tensor:
    magnitude = scales.abs().clamp(min=_TINY)
    scales = torch.where(scales == 0, torch.ones_like(scales), torch.where(scales < 0, -magnitude, magnitude))
    return scales.to(dtype)


def _difference(groups: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    return fake_quantize_groups(groups, scales, zeros, scheme).sub_(groups)


def _sum_of_squares(difference: Tensor) -> Tensor:
    return difference.square_().sum(-1)
