"""The torch reference as a backend: takes everything, on any device, at the price of dequantizing."""

from __future__ import annotations

from torch import Tensor

from ..quantization import QuantizedWeight
from . import reference
from .backend import Backend, PreparedWeight, Problem, Weight


class ReferenceWeight(PreparedWeight):
    """The weight as it is."""

    backend = "reference"

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.activation = "exact"
        self.in_features, self.out_features = reference.weight_shape(weight)
        self.nbytes = weight.nbytes

    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        result = reference.dequant_gemm(x, self.weight, bias, activation, residual)
        return result if out is None else out.copy_(result)

    def unpack(self) -> Weight:
        return self.weight


class ReferenceBackend(Backend):
    name = "reference"

    def unavailable(self) -> str | None:
        return None

    def refuses(self, problem: Problem) -> str | None:
        return None

    def cost(self, problem: Problem) -> float:
        # Makes an fp32 copy of the weight each time, in passes that move it about eight times.
        return 1.0 + 8.0 * 4.0 * problem.K * problem.N / max(1.0, problem.weight_bytes)

    def prepare(self, weight: Weight, problem: Problem) -> ReferenceWeight:
        if isinstance(weight, QuantizedWeight):
            moved = {name: tensor.to(problem.device) for name, tensor in weight.tensors().items()}
            weight = QuantizedWeight(
                moved["qweight"],
                moved["scales"],
                weight.in_features,
                weight.bits,
                weight.group_size,
                moved.get("zeros"),
                moved.get("g_idx"),
            )
            return ReferenceWeight(weight)
        return ReferenceWeight(weight.to(problem.device))
