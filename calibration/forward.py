"""Heads on given hidden states, in fp32: what every weight, float or quantized, is judged by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints import MedusaHeads
from ..quantization import QuantizedWeight

Matrix = Tensor | QuantizedWeight

# Output rows made dense at a time: an LM matrix is never held in fp32 as a whole.
_ROWS = 4096


def linear(states: Tensor, matrix: Matrix) -> Tensor:
    """fp32 [M, N] = states [M, K] times a float matrix [N, K], or a QuantizedWeight [K, N]."""
    outputs = matrix.out_features if isinstance(matrix, QuantizedWeight) else matrix.shape[0]
    result = states.new_empty((states.shape[0], outputs))
    for rows, block in dense_rows(matrix):
        torch.matmul(states, block.t(), out=result[:, rows]) if result.numel() else None
    return result


def dense_rows(matrix: Matrix) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of output rows as fp32 [n, K], with where they stand."""
    outputs = matrix.out_features if isinstance(matrix, QuantizedWeight) else matrix.shape[0]
    for start in range(0, outputs, _ROWS):
        rows = slice(start, min(start + _ROWS, outputs))
        dense = matrix.columns(rows).dequantize().t() if isinstance(matrix, QuantizedWeight) else matrix[rows]
        yield rows, dense.float()


def resblock(states: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """x + silu(W x + b) for fp32 states [M, H]."""
    inner = linear(states, weight)
    if bias is not None:
        inner += bias.float()
    return states + F.silu(inner)


def head_states(heads: MedusaHeads, head: int, states: Tensor) -> Tensor:
    """fp32 [M, H]: a head's states before its LM matrix."""
    for layer in range(heads.num_layers):
        bias = heads.resblock_bias(head, layer)
        weight = heads.resblock_weight(head, layer).load()
        states = resblock(states, weight, None if bias is None else bias.dense())
    return states
