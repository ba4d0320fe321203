"""The CPU kernels as a dispatch backend."""

from __future__ import annotations

import torch

from ..backend import Backend, Problem, Weight
from .build import CompileError
from .gemm import CpuWeight
from .isa import chosen_isa
from .library import library

# Rows per pass whose multiplications (one digit an activation) take as long as reading the weight, as
# measured on 2 cores at K 576 N 49152 and K 4096 N 32000.
_BOUND_ROWS = {
    "avx512_bf16": {"int4": 5.0, "int8": 8.0, "fp32": 11.0, "fp16": 6.0, "bf16": 11.0},
    "avx512": {"int4": 5.0, "int8": 8.0, "fp32": 11.0, "fp16": 6.0, "bf16": 6.0},
    "avx2": {"int4": 1.6, "int8": 2.3, "fp32": 8.0, "fp16": 4.0, "bf16": 4.0},
    "portable": {"int4": 0.25, "int8": 0.25, "fp32": 0.25, "fp16": 0.25, "bf16": 0.25},
}


class CpuBackend(Backend):
    """Own C++ kernels: any M, N, K, group size, zero points and act-order."""

    name = "cpu"

    def unavailable(self) -> str | None:
        try:
            library()
        except CompileError as error:
            return str(error)
        return None

    def refuses(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return "runs on the CPU only"
        if problem.weight_dtype not in ("int4", "int8", "fp32", "fp16", "bf16"):
            return f"no {problem.weight_dtype} weights"
        return None

    def cost(self, problem: Problem) -> float:
        # Memory-bound up to the M where the multiplications take as long as reading the weight.
        bound = _BOUND_ROWS[chosen_isa()][problem.weight_dtype]
        planes = 1
        if problem.weight_dtype.startswith("int") and problem.activation != "int8":
            planes = 3 if problem.activation_dtype == torch.float32 else 2
        return max(1.0, problem.rows * planes / bound)

    def prepare(self, weight: Weight, problem: Problem) -> CpuWeight:
        return CpuWeight(weight, problem.activation)
