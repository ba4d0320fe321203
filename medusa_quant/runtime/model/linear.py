"""A linear layer of the base: a weight packed for a kernel, its bias, and the fused tail."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import kernels
from ...kernels import PreparedWeight
from ...kernels.dispatch import unavailable
from ...quantization import QuantizedWeight

# Rows torch multiplies at a time: one fixed shape, so that a row's sum is formed alike whatever the batch.
_BLOCK_ROWS = 16


class Linear:
    """y = act(x W^T + bias) (+ residual), fp32 accumulation; W is [N, K] or a QuantizedWeight [K, N].

    On the CPU a row of y does not depend on the other rows of x, bit for bit. activation: "int8" lets
    integer weights meet activations quantized per row; "exact" keeps those in `dtype`. backend: the
    kernels that run it. nbytes: what one pass reads.
    """

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        activation: str = "exact",
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        self.activation = activation if isinstance(weight, QuantizedWeight) else "exact"
        self._low_rank: tuple[Tensor, Tensor] | None = None
        if isinstance(weight, QuantizedWeight) and weight.low_rank_a is not None:
            assert weight.low_rank_b is not None
            self._low_rank = weight.low_rank_a.to(device, dtype), weight.low_rank_b.to(device, dtype)
            weight = replace(weight, low_rank_a=None, low_rank_b=None)
        self._bias = None if bias is None else bias.to(device, dtype)
        self._dense: Tensor | None = None
        # Of the CPU's backends only ours keeps rows apart, so it is not left to dispatch.
        on_cpu = device.type == "cpu"
        if on_cpu and unavailable("cpu") is not None:
            dense = weight.dequantize().t() if isinstance(weight, QuantizedWeight) else weight
            self._dense = dense.to(dtype).contiguous()
            self.backend, self.nbytes, self.out_features = "torch", self._dense.nbytes, dense.shape[0]
            return
        self._prepared = kernels.prepare(weight, device, dtype, activation, "cpu" if on_cpu else None)
        self.backend, self.nbytes = self._prepared.backend, self._prepared.nbytes
        self.out_features = self._prepared.out_features
        if self._low_rank is not None:
            self.nbytes += sum(factor.nbytes for factor in self._low_rank)

    @property
    def native(self) -> tuple[PreparedWeight, Tensor | None] | None:
        """Weight and bias for kernels that run many layers at once, or None where torch has a part in it."""
        if self._dense is not None or self._low_rank is not None or self.backend != "cpu":
            return None
        return self._prepared, self._bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, activation: str | None = None) -> Tensor:
        """x [M, K] -> [M, N]; activation: None or "silu"; residual [M, N] is added last."""
        if self._dense is None and self._low_rank is None:
            return self._prepared.run(x, self._bias, activation, residual)
        y = self._prepared.run(x) if self._dense is None else _blocked(x, self._dense)
        if self._low_rank is not None:
            down, up = self._low_rank
            y += _blocked(_blocked(x, down.t()), up.t())
        if self._bias is not None:
            y += self._bias
        if activation == "silu":
            # In fp64: which of torch's fp32 exponentials a value meets depends on the batch.
            y = F.silu(y.double()).to(y.dtype)
        return y if residual is None else y.add_(residual)


def _blocked(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % _BLOCK_ROWS))
    blocks = [F.linear(block, weight) for block in padded.split(_BLOCK_ROWS)]
    return torch.cat(blocks)[:rows] if blocks else x.new_empty((0, weight.shape[0]))
