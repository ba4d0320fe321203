"""The Triton kernels as a backend of the dispatcher: one weight, any CUDA or ROCm device."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from ...quantization import QuantizedWeight
from ..backend import Backend, PreparedWeight, Problem, Weight
from .weight import pack, unpack, unsupported_group

# Estimates until measured on a device: a pass near the memory floor, and matrix units that keep up with it
# to about 128 rows; fp32 activations leave them unused.
_COST = 1.2
_BALANCED_ROWS = 128
_FP32_PENALTY = 8.0


class TritonPrepared(PreparedWeight):
    """A QuantizedWeight packed by `weight.pack`."""

    backend = "triton"
    activation = "exact"

    def __init__(self, weight: QuantizedWeight, device: torch.device) -> None:
        self.packed = pack(weight).to(device)
        self.in_features, self.out_features = weight.shape
        self.nbytes = self.packed.nbytes

    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        from .heads import dequant_gemm

        self.check(x, bias, activation, residual)
        result = dequant_gemm(x, self.packed, bias, activation, residual)
        return result if out is None else out.copy_(result)

    def unpack(self) -> QuantizedWeight:
        return unpack(self.packed)[0]


class TritonBackend(Backend):
    """int8 and int4 weights with fp16, bf16 or fp32 activations."""

    name = "triton"

    def unavailable(self) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if _interpreting() or torch.cuda.is_available():
            return None
        return "no CUDA or ROCm device"

    def refuses(self, problem: Problem) -> str | None:
        if problem.weight_dtype not in ("int4", "int8"):
            return f"{problem.weight_dtype} weights are not quantized"
        if problem.device.type != "cuda":
            if not _interpreting():
                return f"runs on CUDA and ROCm devices, not on {problem.device.type}"
            if problem.activation_dtype == torch.bfloat16:
                return "the interpreter computes bf16 wrongly"
        if problem.act_order:
            return "act-order weights (g_idx) have no contiguous groups"
        return unsupported_group(problem.group_size)

    def cost(self, problem: Problem) -> float:
        penalty = _FP32_PENALTY if problem.activation_dtype == torch.float32 else 1.0
        return _COST * penalty * max(1.0, problem.rows / _BALANCED_ROWS)

    def prepare(self, weight: Weight, problem: Problem) -> TritonPrepared:
        if not isinstance(weight, QuantizedWeight):
            raise ValueError("the triton backend takes quantized weights only")
        return TritonPrepared(weight, problem.device)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
