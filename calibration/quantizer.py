"""`CalibratedQuantizer`: what `convert` calls for each matrix, sequential inside a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checkpoints import MedusaHeads
from ..checkpoints.heads import LM_HEAD, TensorId
from ..errors import InputError
from ..plan import PlannedTensor
from ..quantization import QuantizedWeight, WeightError
from .forward import Matrix, resblock
from .hessian import Hessian, prepare_hessian
from .solve import solve
from .statistics import Statistics


class CalibratedQuantizer:
    """Quantizes each matrix for the inputs it will really see.

    The first ResBlocks of all heads share one Hessian, that of the base's final hidden states. Every later
    matrix gets the Hessian of the outputs of the *quantized* matrices before it, on a sample of states.
    Tensors must come in the order of heads and layers, as `convert` sends them.
    """

    def __init__(self, heads: MedusaHeads, statistics: Statistics, low_rank: int = 0) -> None:
        statistics.check_fits(heads.hidden_size, _full_vocab(heads), str(heads.path))
        if not statistics.states.shape[0]:
            raise InputError("the statistics hold no calibration states", fix="calibrate on more prompts")
        self.heads, self.statistics, self.low_rank = heads, statistics, low_rank
        self.report: dict[str, dict[str, Any]] = {}
        self._first: Hessian | None = None
        self._quantized: dict[TensorId, Matrix] = {}

    def __call__(self, weight: Tensor, planned: PlannedTensor) -> tuple[QuantizedWeight, WeightError]:
        """weight [N, K] of the planned tensor -> its codes and weight error; see `stages.Quantizer`."""
        assert planned.scheme is not None
        tensor_id = planned.tensor.id
        hessian = self.hessian(tensor_id)
        low_rank = min(self.low_rank, *weight.shape)
        quantized, error, report = solve(weight, planned.scheme, planned.method, hessian, low_rank)
        self.report[str(tensor_id)] = report.as_dict()
        if tensor_id.role != LM_HEAD:
            self._quantized = {key: m for key, m in self._quantized.items() if key.head == tensor_id.head}
            self._quantized[tensor_id] = quantized
        return quantized, error

    def hessian(self, tensor_id: TensorId) -> Hessian:
        """Of the inputs of one matrix, given what was quantized before it."""
        if tensor_id.layer == 0:
            if self._first is None:
                self._first = prepare_hessian(self.statistics.mean_second_moment(), "final hidden states")
            return self._first
        states = self.inputs(tensor_id).double()
        return prepare_hessian(states.t() @ states / states.shape[0], f"inputs of {tensor_id}")

    def inputs(self, tensor_id: TensorId) -> Tensor:
        """fp32 [S, H]: sampled inputs of one matrix."""
        states, head = self.statistics.states.float(), tensor_id.head
        for layer in range(tensor_id.layer):
            tensor = self.heads.resblock_weight(head, layer)
            bias = self.heads.resblock_bias(head, layer)
            weight = self._quantized.get(tensor.id)
            states = resblock(
                states, tensor.load() if weight is None else weight, None if bias is None else bias.dense()
            )
        return states


def _full_vocab(heads: MedusaHeads) -> int | None:
    """V of the base: with a token map the LM matrix has fewer rows."""
    return heads.vocab_size if heads.token_map() is None else None
