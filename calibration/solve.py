"""Quantizing one matrix with a Hessian: every method's codes, and per output row the better of two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..quantization import NonFiniteError, QuantizedWeight, Scheme, WeightError, choose_params
from ..quantization.affine import dequantize_groups, quantize_groups
from ..quantization.params import scales_fit
from ..quantization.quantize import group_rows, ungroup_rows
from .clip import group_cost
from .gptq import ROW_BLOCK, gptq_codes
from .hessian import Hessian
from .low_rank import low_rank_factors
from .refine import refine_scales

CALIBRATED_METHODS = ("rtn", "mse", "awq-clip", "gptq")
_REFINEMENTS = 1


@dataclass
class SolveReport:
    """How one matrix went. rows_kept: output rows where the simpler method's codes had less output error
    and were kept. output_error: sqrt(tr(D H D^T) / tr(W H W^T)) on the calibration set."""

    method: str
    damping: float
    dead_inputs: int
    rows: int
    rows_kept: dict[str, int] = field(default_factory=dict)
    output_error: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class _Rows(NamedTuple):
    """Rows being quantized: codes int8 [n, K], scales [n, G] as stored, zeros int8 [n, G] or None, and
    cost fp32 [n], the output error."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    cost: Tensor

    def first(self, count: int) -> _Rows:
        """The first rows of them."""
        zeros = None if self.zeros is None else self.zeros[:count]
        return _Rows(self.codes[:count], self.scales[:count], zeros, self.cost[:count])


def solve(
    weight: Tensor, scheme: Scheme, method: str, hessian: Hessian, low_rank: int = 0
) -> tuple[QuantizedWeight, WeightError, SolveReport]:
    """Quantize a float matrix [N, K] by its output error under the Hessian of its inputs.

    method: rtn, mse, awq-clip (clip search on outputs) or gptq. Each method starts from a simpler one
    (mse from rtn, awq-clip from mse, gptq from awq-clip's scales) and a row whose output error it does not
    lower keeps the simpler one's codes, so that a dearer method is never worse on the calibration set.
    A row's result depends on the row, the Hessian and the scale dtype alone.
    low_rank: rank of the correction to add, 0 for none.
    Raises NonFiniteError for NaN or Inf, InputError for a Hessian of another size.
    """
    if method not in CALIBRATED_METHODS:
        raise InputError("unknown method", expected=" | ".join(CALIBRATED_METHODS), found=method)
    if weight.shape[1] != hessian.in_features:
        raise InputError(
            "calibration does not fit this matrix", expected=f"K {weight.shape[1]}", found=hessian.in_features
        )
    try:
        result = _solve(weight, scheme, method, hessian, torch.float16)
    except _ScalesDoNotFit:
        result = _solve(weight, scheme, method, hessian, torch.float32)
    if low_rank:
        result = (_corrected(weight, result[0], hessian, low_rank), *result[1:])
    return (*_measured(weight, result[0], hessian, result[1]),)


class _ScalesDoNotFit(Exception):
    pass


def _solve(
    weight: Tensor, scheme: Scheme, method: str, hessian: Hessian, scale_dtype: torch.dtype
) -> tuple[QuantizedWeight, SolveReport]:
    report = SolveReport(method, hessian.damping, hessian.dead, weight.shape[0])
    solver = _Solver(scheme, hessian, scale_dtype, report)
    done = []
    for block in weight.split(ROW_BLOCK):
        rows = block.float()
        if not bool(torch.isfinite(rows).all()):
            raise NonFiniteError("the matrix holds NaN or Inf")
        done.append(solver.rows(rows, method))
    codes = torch.cat([part.codes for part in done]).t()
    scales = torch.cat([part.scales for part in done]).t().contiguous()
    zeros = None
    if not scheme.symmetric:
        zeros = torch.cat([part.zeros for part in done if part.zeros is not None]).t().contiguous()
    quantized = QuantizedWeight.from_codes(codes.contiguous(), scales, scheme.bits, scheme.group_size, zeros)
    return quantized, report


class _Solver:
    def __init__(
        self, scheme: Scheme, hessian: Hessian, scale_dtype: torch.dtype, report: SolveReport
    ) -> None:
        self.scheme, self.hessian, self.scale_dtype, self.report = scheme, hessian, scale_dtype, report
        self.width = scheme.group_width(hessian.in_features)
        self.group_cost = group_cost(hessian.matrix, self.width)

    def rows(self, rows: Tensor, method: str) -> _Rows:
        """Quantize fp32 [n, K], n <= ROW_BLOCK. Padded to ROW_BLOCK, so that sums are formed alike."""
        count = rows.shape[0]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, ROW_BLOCK - count))
        best = self._rounded(padded, "rtn")
        if method != "rtn":
            best = self._better(best, self._rounded(padded, "mse"), "rtn", count)
        if method in ("awq-clip", "gptq"):
            clipped = self._rounded(padded, "mse", on_outputs=True)
            best = self._better(best, clipped, "mse", count)
        if method == "gptq":
            compensated = self._compensated(padded, clipped)
            best = self._better(best, compensated, "awq-clip", count)
        return best.first(count)

    def _rounded(self, rows: Tensor, method: str, on_outputs: bool = False) -> _Rows:
        groups = group_rows(rows, self.scheme)
        cost = self.group_cost if on_outputs else None
        scales, zeros = choose_params(groups, self.scheme, method, self.scale_dtype, cost)
        self._check(scales)
        codes = quantize_groups(groups, scales, zeros, self.scheme)
        return self._costed(rows, ungroup_rows(codes, rows.shape[1]).to(torch.int8), scales, zeros)

    def _compensated(self, rows: Tensor, start: _Rows) -> _Rows:
        """GPTQ, then scales refitted to its codes and GPTQ again, as long as rows get better."""
        best = self._gptq(rows, start.scales, start.zeros)
        for _ in range(_REFINEMENTS):
            fitted = refine_scales(rows, best.codes, best.zeros, self.width, self.hessian)
            # Where a fit leaves what the dtype can hold, the row keeps its scales.
            usable = (fitted.abs() > torch.finfo(self.scale_dtype).tiny) & torch.isfinite(
                fitted.to(self.scale_dtype)
            )
            scales = torch.where(usable, fitted.to(self.scale_dtype), best.scales)
            refitted = self._costed(rows, best.codes, scales, best.zeros)
            again = self._gptq(rows, scales, best.zeros)
            best = _pick(_pick(best, refitted), again)
        return best

    def _gptq(self, rows: Tensor, scales: Tensor, zeros: Tensor | None) -> _Rows:
        codes = gptq_codes(rows, self.hessian, scales, zeros, self.scheme)
        return self._costed(rows, codes, scales, zeros)

    def _costed(self, rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> _Rows:
        values = dequantize_groups(group_rows(codes.float(), self.scheme), scales, zeros)
        difference = ungroup_rows(values, rows.shape[1]) - rows
        return _Rows(codes, scales, zeros, self.hessian.quadratic_error(difference))

    def _better(self, simple: _Rows, dearer: _Rows, name: str, count: int) -> _Rows:
        kept = int((simple.cost[:count] < dearer.cost[:count]).sum())
        self.report.rows_kept[name] = self.report.rows_kept.get(name, 0) + kept
        return _pick(simple, dearer)

    def _check(self, scales: Tensor) -> None:
        if self.scale_dtype == torch.float16 and not scales_fit(scales):
            raise _ScalesDoNotFit
        if not bool(torch.isfinite(scales).all()):
            raise NonFiniteError("the matrix holds NaN or Inf")


def _pick(first: _Rows, second: _Rows) -> _Rows:
    """Per row the one with less output error; the second where equal."""
    keep = (first.cost < second.cost).unsqueeze(1)
    zeros = None
    if first.zeros is not None and second.zeros is not None:
        zeros = torch.where(keep, first.zeros, second.zeros)
    return _Rows(
        torch.where(keep, first.codes, second.codes),
        torch.where(keep, first.scales, second.scales),
        zeros,
        torch.minimum(first.cost, second.cost),
    )


def _corrected(weight: Tensor, quantized: QuantizedWeight, hessian: Hessian, rank: int) -> QuantizedWeight:
    if rank < 1 or rank > min(weight.shape):
        raise InputError("bad --low-rank", expected=f"1..{min(weight.shape)}", found=rank)
    error = weight.float() - quantized.dequantize().t()
    a, b = low_rank_factors(error, hessian, rank)
    return replace(quantized, low_rank_a=a, low_rank_b=b)


def _measured(
    weight: Tensor, quantized: QuantizedWeight, hessian: Hessian, report: SolveReport
) -> tuple[QuantizedWeight, WeightError, SolveReport]:
    error, cost, norm = WeightError(), 0.0, 0.0
    for start in range(0, weight.shape[0], ROW_BLOCK):
        rows = slice(start, min(start + ROW_BLOCK, weight.shape[0]))
        source, stored = weight[rows].float(), quantized.columns(rows).dequantize().t()
        error.add(source, stored)
        cost += float(hessian.quadratic_error(stored - source).sum(dtype=torch.float64))
        norm += float(hessian.quadratic_error(source).sum(dtype=torch.float64))
    report.output_error = (max(0.0, cost) / norm) ** 0.5 if norm > 0 else 0.0
    return quantized, error, report
