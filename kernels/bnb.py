"""bitsandbytes as a backend: LLM.int8 for int8 weights (optional package), nf4 by `Nf4Weight`."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from ..quantization import QuantizedWeight
from .backend import Backend, PreparedWeight, Problem, Weight
from .torch_native import finish

# Row-wise int8 needs 127 * scale as its statistic, which only a symmetric code range gives exactly.
_INT8_LIMIT = 127.0


class Int8Weight(PreparedWeight):
    """int8 codes [N, K] with one scale per output channel; activations are quantized per row to int8."""

    backend = "bitsandbytes"
    activation = "int8"

    def __init__(self, weight: QuantizedWeight, device: torch.device) -> None:
        self.codes = weight.qweight.t().contiguous().to(device)
        self.scales = weight.scales.to(device)
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
        from bitsandbytes import functional as bnb

        self.check(x, bias, activation, residual)
        if x.shape[0] == 0:
            product = x.new_empty((0, self.out_features), dtype=torch.float32)
        else:
            digits, row_stats, _ = bnb.int8_vectorwise_quant(x.contiguous().to(torch.float16))
            sums = bnb.int8_linear_matmul(digits, self.codes)
            product = sums.float() * (row_stats.float()[:, None] / _INT8_LIMIT) * self.scales[0].float()
        return finish(product, x.dtype, bias, activation, residual, out)

    def unpack(self) -> Weight:
        return QuantizedWeight(self.codes.t().contiguous(), self.scales, self.in_features, 8)


class Nf4Weight(PreparedWeight):
    """A float matrix [N, K] quantized by bitsandbytes to nf4, blocks of 64 along K."""

    backend = "bitsandbytes"
    activation = "exact"

    def __init__(self, weight: Tensor, device: torch.device, block: int = 64) -> None:
        from bitsandbytes import functional as bnb

        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed, self.state = bnb.quantize_4bit(
            weight.to(device).contiguous(), blocksize=block, quant_type="nf4"
        )
        self.nbytes = self.packed.nbytes + self.state.absmax.nbytes

    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.check(x, bias, activation, residual)
        weight = self.unpack()
        assert isinstance(weight, Tensor)
        return finish(x.float() @ weight.float().t(), x.dtype, bias, activation, residual, out)

    def unpack(self) -> Weight:
        """The dequantized matrix [N, K]: nf4 is lossy, so this is what is multiplied, not the source."""
        from bitsandbytes import functional as bnb

        dequantized: Tensor = bnb.dequantize_4bit(self.packed, self.state)
        return dequantized


class BitsAndBytesBackend(Backend):
    name = "bitsandbytes"

    def unavailable(self) -> str | None:
        return None if find_spec("bitsandbytes") else "bitsandbytes is not installed"

    def refuses(self, problem: Problem) -> str | None:
        if problem.weight_dtype != "int8":
            return f"takes int8 weights (and nf4 through Nf4Weight), not {problem.weight_dtype}"
        if problem.group_size != -1 or not problem.symmetric or problem.act_order:
            return "takes symmetric int8 with one scale per output channel only"
        if problem.activation != "int8":
            return "quantizes activations to int8, which was not asked for"
        return None

    def cost(self, problem: Problem) -> float:
        # On the CPU an unfused int32 matmul; on CUDA two extra launches.
        return 20.0 if problem.device.type == "cpu" else 1.5

    def prepare(self, weight: Weight, problem: Problem) -> PreparedWeight:
        if not isinstance(weight, QuantizedWeight):
            raise ValueError("bitsandbytes takes quantized weights here; see Nf4Weight")
        return Int8Weight(weight, problem.device)
