"""Torch's own kernels as a backend: dense linear layers, and `_weight_int8pack_mm` where it is right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..quantization import QuantizedWeight
from .backend import Backend, PreparedWeight, Problem, Weight
from .cpu.isa import available_isas


class DenseWeight(PreparedWeight):
    """A float matrix [N, K] for `F.linear`."""

    backend = "torch_native"

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        self.weight = weight.to(device)
        self.activation = "exact"
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes

    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.check(x, bias, activation, residual)
        # The wider of the two dtypes: casting the weight down would change it.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        product = F.linear(x.to(dtype), self.weight.to(dtype))
        return finish(product, x.dtype, bias, activation, residual, out)

    def unpack(self) -> Weight:
        return self.weight


class Int8PackWeight(PreparedWeight):
    """int8 per output channel for `_weight_int8pack_mm`: codes [N, K], scales [N] in bf16.

    Rounding the scales to bf16 is what the op asks for; the originals are kept for `unpack`.
    """

    backend = "torch_native"

    def __init__(self, weight: QuantizedWeight) -> None:
        self.codes = weight.qweight.t().contiguous()
        self.exact_scales = weight.scales
        self.scales = weight.scales[0].to(torch.bfloat16)
        self.activation = "exact"
        self.in_features, self.out_features = weight.shape
        self.nbytes = self.codes.nbytes + self.scales.nbytes

    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.check(x, bias, activation, residual)
        if x.shape[0] == 0:
            product = x.new_empty((0, self.out_features))
        else:
            product = torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)
        return finish(product, x.dtype, bias, activation, residual, out)

    def unpack(self) -> Weight:
        return QuantizedWeight(self.codes.t().contiguous(), self.exact_scales, self.in_features, 8)


def finish(
    product: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """The epilogue in fp32 for backends whose product comes without one."""
    if bias is not None or activation is not None or residual is not None:
        product = product.float()
        if bias is not None:
            product = product + bias.float()
        if activation == "silu":
            product = F.silu(product)
        if residual is not None:
            product = product + residual.float()
    product = product.to(dtype)
    return product if out is None else out.copy_(product)


class TorchNativeBackend(Backend):
    name = "torch_native"

    def unavailable(self) -> str | None:
        return None

    def refuses(self, problem: Problem) -> str | None:
        if problem.weight_dtype in ("fp32", "fp16", "bf16"):
            return None
        if problem.weight_dtype != "int8":
            return f"no {problem.weight_dtype} weights"
        if problem.device.type != "cpu":
            return "_weight_int8pack_mm runs on the CPU only"
        if problem.group_size != -1 or not problem.symmetric or problem.act_order:
            return "_weight_int8pack_mm takes symmetric weights with one scale per output channel only"
        if problem.activation_dtype != torch.bfloat16:
            return "_weight_int8pack_mm is slower than dense unless activations are bf16"
        if problem.K % 16:
            return "_weight_int8pack_mm is wrong where K is not a multiple of 16"
        return None

    def cost(self, problem: Problem) -> float:
        # Measured at K 4096, N 32000 on 2 cores: int8pack 1.4x its floor at M 1, growing with M; dense
        # 1.8x at M 1, and compute-bound beyond M 32.
        if problem.weight_dtype == "int8":
            return 1.4 + 0.45 * (problem.rows - 1)
        if problem.device.type != "cpu":
            return 1.0
        if "avx512" in available_isas():
            return 1.8 + 0.075 * problem.rows
        # With AVX2 alone 16-bit products are emulated: 1.7x the floor at M 1, and 11x already at M 8.
        return 1.9 + 0.17 * problem.rows if problem.weight_dtype == "fp32" else 0.4 + 1.3 * problem.rows

    def prepare(self, weight: Weight, problem: Problem) -> PreparedWeight:
        if isinstance(weight, QuantizedWeight):
            return Int8PackWeight(weight)
        return DenseWeight(weight, problem.device)
