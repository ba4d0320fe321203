"""What happens to one tensor between source and writer: checks, cast or quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoints.heads import HeadTensor
from .errors import InputError
from .plan import ConvertOptions, PlannedTensor
from .quantization import NonFiniteError, QuantizedWeight, WeightError, quantize_weight
from .workspace.stream import STORED_DTYPES, saturate

# weight [N, K], what is planned for it -> the quantized weight and its error.
Quantizer = Callable[[Tensor, PlannedTensor], tuple[QuantizedWeight, WeightError]]

_BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Staged:
    """A tensor ready to be stored. value: float (out, in), or quantized; float values are cast to
    `dtype` by the writer, saturating where `clip`. error: against the source."""

    value: Tensor | QuantizedWeight
    dtype: torch.dtype
    clip: bool
    error: dict[str, float]


def plain_quantizer(weight: Tensor, planned: PlannedTensor) -> tuple[QuantizedWeight, WeightError]:
    """The quantizer of methods that need no calibration."""
    assert planned.scheme is not None
    return quantize_weight(weight, planned.scheme, planned.method)


def stage(planned: PlannedTensor, options: ConvertOptions, quantizer: Quantizer) -> Staged:
    """Load one tensor and make it what the plan says.

    Raises InputError naming the tensor for NaN or Inf, and for values that overflow the target dtype.
    """
    tensor = planned.tensor
    value = tensor.load()
    if planned.scheme is not None:
        assert isinstance(value, Tensor)
        try:
            weight, error = quantizer(value, planned)
        except NonFiniteError:
            _refuse_nonfinite(tensor, value, "an integer code cannot stand for them")
            raise
        return Staged(weight, weight.qweight.dtype, False, error.as_dict())
    if isinstance(value, QuantizedWeight):
        if planned.method == "keep":
            return Staged(value, value.qweight.dtype, False, tensor.error or {"relative": 0.0, "max": 0.0})
        value = value.dequantize().t()
    dtype = STORED_DTYPES[planned.dtype]
    if not dtype.is_floating_point:
        return Staged(value, dtype, False, {"relative": 0.0, "max": 0.0})
    return _cast(tensor, value, dtype, options)


def _cast(tensor: HeadTensor, value: Tensor, dtype: torch.dtype, options: ConvertOptions) -> Staged:
    limit = torch.finfo(dtype).max
    error, overflowing = WeightError(), False
    narrowing = value.dtype != dtype
    for block in _blocks(value):
        low, high = (float(bound) for bound in block.aminmax())
        if not (low > float("-inf") and high < float("inf")):
            if not options.allow_nonfinite:
                _refuse_nonfinite(tensor, value, "pass --allow-nonfinite to keep them in a float dtype")
            block = torch.where(torch.isfinite(block), block, torch.zeros((), dtype=block.dtype))
        if not narrowing:
            continue
        stored = block.to(dtype)
        if not bool(torch.isfinite(stored).all()):
            overflowing = True
            stored = saturate(block, dtype)
        error.add(block, stored)
    if overflowing and options.on_overflow == "error":
        count = sum(int((~torch.isfinite(b.to(dtype)) & torch.isfinite(b)).sum()) for b in _blocks(value))
        largest = max(float(b[torch.isfinite(b)].abs().max()) for b in _blocks(value))
        raise InputError(
            f"{tensor.id}: {count} values overflow {str(dtype).removeprefix('torch.')}",
            file=tensor.file,
            key=tensor.key,
            expected=f"at most {limit:g}",
            found=f"{largest:g}",
            fix="choose --dtype bf16 or fp32, or saturate with --on-overflow clip",
        )
    return Staged(value, dtype, overflowing, error.as_dict())


def _refuse_nonfinite(tensor: HeadTensor, value: Tensor, fix: str) -> None:
    nan = sum(int(block.isnan().sum()) for block in _blocks(value))
    inf = sum(int(block.isinf().sum()) for block in _blocks(value))
    if nan or inf:
        raise InputError(
            f"{tensor.id} holds {nan} NaN and {inf} Inf values", file=tensor.file, key=tensor.key, fix=fix
        )


def _blocks(value: Tensor) -> Iterator[Tensor]:
    rows = value if value.ndim > 1 else value.unsqueeze(0)
    step = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step]
