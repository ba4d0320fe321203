"""A linear layer of the base: a dense or quantized weight, its bias, and the fused tail."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quantization import QuantizedWeight

# Rows multiplied at a time: one fixed shape, so that a row's sum is formed alike whatever the batch.
_BLOCK_ROWS = 16


class Linear:
    """y = x W^T + bias (+ residual), fp32 accumulation; W is [N, K] or a QuantizedWeight [K, N]."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.nbytes = weight.nbytes
        dense = weight.dequantize().t() if isinstance(weight, QuantizedWeight) else weight
        self._weight = dense.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N]; residual [M, N] is added last."""
        y = _blocked(x, self._weight)
        if self._bias is not None:
            y += self._bias
        return y if residual is None else y.add_(residual)


def _blocked(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % _BLOCK_ROWS))
    blocks = [F.linear(block, weight) for block in padded.split(_BLOCK_ROWS)]
    return torch.cat(blocks)[:rows] if blocks else x.new_empty((0, weight.shape[0]))
