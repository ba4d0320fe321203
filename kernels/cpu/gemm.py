"""CPU weights ready to multiply, and calls of `mq_gemm` (csrc/gemm.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...quantization import QuantizedWeight
from ..backend import PreparedWeight, Weight
from .library import DENSE, DTYPE_CODES, INT4, INT8, JobStruct, WeightStruct, library
from .packing import (
    pack_codes,
    pack_columns,
    pack_dense,
    segments_of,
    unpack_codes,
    unpack_columns,
    unpack_dense,
)
from .pages import on_huge_pages


class CpuWeight(PreparedWeight):
    """A weight packed for the C++ kernels.

    Integer weights multiply activations in fixed point, one scale per row and group: 8 bits for
    activation "int8"; for "exact" 16 bits (x in bf16 or fp16) or 22 bits (fp32), which is finer than the
    rounding of the result. Float weights multiply in fp32.
    """

    backend = "cpu"

    def __init__(self, weight: Weight, activation: str = "exact") -> None:
        self.activation = activation
        self._struct = WeightStruct()
        if isinstance(weight, QuantizedWeight):
            self.in_features, self.out_features = weight.shape
            self._pack_integer(weight)
        else:
            self.out_features, self.in_features = weight.shape
            self._packed = on_huge_pages(pack_dense(weight))
            self.nbytes = weight.nbytes
            self._struct.kind, self._struct.dtype = DENSE, DTYPE_CODES[weight.dtype]
        self._struct.codes = self._packed.data_ptr()
        self._struct.in_features, self._struct.out_features = self.in_features, self.out_features
        self.address = ctypes.addressof(self._struct)
        self.is_integer = self._struct.kind != DENSE

    def _pack_integer(self, weight: QuantizedWeight) -> None:
        self.bits, self.group_size = weight.bits, weight.group_size
        self.nbytes = weight.nbytes
        self._cut = segments_of(weight)
        self._g_idx = weight.g_idx
        self._packed = on_huge_pages(pack_codes(weight.codes(), self._cut.feature, weight.bits))
        scales = weight.scales if weight.scales.dtype == torch.float16 else weight.scales.float()
        self._scales = pack_columns(scales)
        self._zeros = None if weight.zeros is None else pack_columns(weight.zeros)
        struct = self._struct
        struct.kind, struct.dtype = INT4 if weight.bits == 4 else INT8, DTYPE_CODES[scales.dtype]
        struct.scales = self._scales.data_ptr()
        struct.zeros = None if self._zeros is None else self._zeros.data_ptr()
        struct.segments, struct.scale_row = self._cut.starts.data_ptr(), self._cut.scale_row.data_ptr()
        struct.feature = None if self._cut.identity else self._cut.feature.data_ptr()
        struct.num_segments, struct.scale_rows = len(self._cut.scale_row), scales.shape[0]
        struct.layout = self._cut.layout

    def planes(self, dtype: torch.dtype) -> int:
        """Signed bytes each activation of this dtype is split into (integer weights)."""
        if self.activation == "int8":
            return 1
        return 3 if dtype == torch.float32 else 2

    def unpack(self) -> Weight:
        if not self.is_integer:
            return unpack_dense(self._packed, self.shape)
        codes = unpack_codes(self._packed, self._cut.feature, self.bits, self.shape)
        zeros = None if self._zeros is None else unpack_columns(self._zeros, self.out_features)
        scales = unpack_columns(self._scales, self.out_features)
        return QuantizedWeight.from_codes(codes, scales, self.bits, self.group_size, zeros, self._g_idx)

    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        arguments, _keep, out = self._arguments(x, bias, activation, residual, out)
        library().mq_gemm_one(self.address, *arguments, torch.get_num_threads())
        return out

    def _arguments(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> tuple[tuple[int | None, ...], tuple[Tensor | None, ...], Tensor]:
        """Fields of `Job` after the weight, the tensors they point into, and the result."""
        self.check(x, bias, activation, residual)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, dtype = x.shape[0], x.dtype
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=dtype)
        elif out.shape != (rows, self.out_features) or out.dtype != dtype or out.stride(1) != 1:
            raise ValueError(f"out must be {dtype} [{rows}, {self.out_features}] with contiguous rows")
        if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
            bias = bias.float().contiguous()
        if residual is not None and (residual.dtype != dtype or residual.stride(1) != 1):
            residual = residual.to(dtype).contiguous()
        code = DTYPE_CODES[dtype]
        fields = (
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            code,
            code,
            self.planes(dtype) if self.is_integer else 1,
            activation == "silu",
        )
        return fields, (x, bias, residual), out


GemmCall = tuple[Tensor, CpuWeight, Tensor | None, str | None, Tensor | None, Tensor | None]


def run_jobs(calls: Sequence[GemmCall]) -> list[Tensor]:
    """Several GEMMs in one parallel region: (x, weight, bias, activation, residual, out) each.

    Calls sharing x (q, k, v; gate, up) pack it once; calls with an x each (one LM matrix per head) share
    only the region.
    """
    jobs = (JobStruct * len(calls))()
    keep, results = [], []
    for index, (x, weight, bias, activation, residual, out) in enumerate(calls):
        fields, tensors, result = weight._arguments(x, bias, activation, residual, out)
        jobs[index] = JobStruct(weight.address, *fields)
        keep.append(tensors)
        results.append(result)
    library().mq_gemm(ctypes.addressof(jobs), len(calls), torch.get_num_threads())
    return results
