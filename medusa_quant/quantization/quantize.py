"""Quantizing one matrix, streamed over its output channels so that no fp32 copy of it ever exists."""

from __future__ import annotations

import torch
from torch import Tensor

from .affine import dequantize_groups, quantize_groups
from .error import WeightError
from .packing import pack_int4
from .params import choose_params, scales_fit
from .scheme import Scheme
from .weight import QuantizedWeight

# fp32 elements per block: its temporaries stay in the last-level cache.
_BLOCK_ELEMENTS = 1 << 20


class NonFiniteError(ValueError):
    """The matrix holds NaN or Inf, which no integer code can stand for."""


def quantize_weight(
    weight: Tensor, scheme: Scheme, method: str = "rtn", scale_dtype: torch.dtype | None = None
) -> tuple[QuantizedWeight, WeightError]:
    """Quantize a float matrix [N, K] (out, in) of any float dtype, memory-mapped or not.

    method: `rtn` or `mse`, see `choose_params`.
    scale_dtype: fp16 or fp32; None stores fp16 and falls back to fp32 for the whole matrix where fp16
        would underflow or overflow.
    Returns the weight ([K, N] as stored) and its error against the input.
    Raises NonFiniteError for NaN or Inf.
    """
    if scale_dtype is not None:
        return _quantize(weight, scheme, method, scale_dtype)
    try:
        return _quantize(weight, scheme, method, torch.float16)
    except _ScalesDoNotFit:
        return _quantize(weight, scheme, method, torch.float32)


def group_rows(rows: Tensor, scheme: Scheme) -> Tensor:
    """Cut fp32 [n, K] into [n, G, g], padding a short last group with zeros."""
    count, features = rows.shape
    width, groups = scheme.group_width(features), scheme.num_groups(features)
    if groups * width != features:
        rows = torch.nn.functional.pad(rows, (0, groups * width - features))
    return rows.reshape(count, groups, width)


def ungroup_rows(groups: Tensor, features: int) -> Tensor:
    """Inverse of `group_rows`: [n, G, g] -> [n, K]."""
    return groups.reshape(groups.shape[0], -1)[:, :features]


class _ScalesDoNotFit(Exception):
    pass


def _quantize(
    weight: Tensor, scheme: Scheme, method: str, scale_dtype: torch.dtype
) -> tuple[QuantizedWeight, WeightError]:
    outputs, features = weight.shape
    groups = scheme.num_groups(features)
    if scheme.bits == 4:
        qweight = torch.empty(((features + 1) // 2, outputs), dtype=torch.uint8)
    else:
        qweight = torch.empty((features, outputs), dtype=torch.int8)
    scales = torch.empty((groups, outputs), dtype=scale_dtype)
    zeros = None if scheme.symmetric else torch.empty((groups, outputs), dtype=torch.int8)
    error = WeightError()
    step = max(1, _BLOCK_ELEMENTS // max(1, features))
    # Two buffers for all blocks: fresh memory for each would cost more than the arithmetic.
    width = scheme.group_width(features)
    padded = torch.zeros((min(step, outputs), groups * width))
    code_buffer = torch.empty((min(step, outputs), groups, width))
    for start in range(0, outputs, step):
        block = slice(start, min(start + step, outputs))
        count = block.stop - start
        padded[:count, :features].copy_(weight[block])
        grouped = padded[:count].view(count, groups, width)
        block_scales, block_zeros = choose_params(grouped, scheme, method, scale_dtype)
        if scale_dtype == torch.float16 and not scales_fit(block_scales):
            raise _ScalesDoNotFit
        if not bool(torch.isfinite(block_scales).all()):
            raise NonFiniteError("the matrix holds NaN or Inf")
        codes = quantize_groups(grouped, block_scales, block_zeros, scheme, out=code_buffer[:count])
        signed = ungroup_rows(codes, features).to(torch.int8).t()
        qweight[:, block] = pack_int4(signed) if scheme.bits == 4 else signed
        scales[:, block] = block_scales.t()
        if zeros is not None and block_zeros is not None:
            zeros[:, block] = block_zeros.t()
        dequantize_groups(codes, block_scales, block_zeros, out=codes).sub_(grouped)
        error.add_difference(grouped, codes)  # the padding of a short group has none
    return QuantizedWeight(qweight, scales, features, scheme.bits, scheme.group_size, zeros), error
