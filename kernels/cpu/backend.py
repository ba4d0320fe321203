"""The CPU kernels as a dispatch backend."""

from __future__ import annotations

import torch

from ..backend import Backend, Problem, Weight
from .build import CompileError
from .gemm import CpuWeight
from .isa import chosen_isa
from .library import library


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
        bound = {"avx512": 6, "avx2": 2, "portable": 0.25}[chosen_isa()]
        planes = 1 if problem.activation == "int8" else 2 if problem.activation_dtype != torch.float32 else 3
        if problem.weight_dtype not in ("int4", "int8"):
            planes = 4
        return max(1.0, problem.rows * planes / bound)

    def prepare(self, weight: Weight, problem: Problem) -> CpuWeight:
        return CpuWeight(weight, problem.activation)
