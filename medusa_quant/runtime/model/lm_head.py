"""`LMHead`: an LM matrix, whole or one rank's shard of it, to logits or straight to the best tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import ops
from ..ranks import ALONE, Ranks
from .linear import Linear

WHOLE, VOCAB, HIDDEN = "whole", "vocab", "hidden"


class LMHead:
    """split: `whole`; `vocab`, where a rank holds equal shares of the padded vocabulary; or `hidden`, where
    it holds a share of the input features. vocab_size: the true V. The rest is as in `Linear`."""

    def __init__(self, linear: Linear, vocab_size: int, split: str = WHOLE, ranks: Ranks = ALONE) -> None:
        self._linear, self.vocab_size, self._ranks = linear, vocab_size, ranks
        self._split = WHOLE if ranks.tp == 1 else split
        self.activation, self.backend, self.nbytes = linear.activation, linear.backend, linear.nbytes
        self.native = linear.native

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [M, V] of states [M, H]; padding of the vocabulary is cut off."""
        if self._split == HIDDEN:
            return self._ranks.sum(self._linear(x[:, self._ranks.mine(x.shape[1])].contiguous()))
        logits = self._linear(x)
        if self._split == VOCAB:
            logits = self._ranks.gather(logits)[:, : self.vocab_size]
        return logits

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As `ops.top_k` of the logits; of a vocabulary split, ranks exchange their k best only."""
        if self._split != VOCAB:
            return ops.top_k(self(x), k)
        logits = self._linear(x)
        width = logits.shape[1]
        first = self._ranks.rank * width
        real = max(0, min(width, self.vocab_size - first))
        values = logits.new_full((len(x), k), float("-inf"), dtype=torch.float32)
        tokens = torch.zeros((len(x), k), dtype=torch.int64, device=x.device)
        count = min(k, real)
        if count:
            best, places = ops.top_k(logits[:, :real], count)
            values[:, :count], tokens[:, :count] = best, places + first
        # Candidates lie by rank, then by value: the first of equal ones is the smallest token, as in `top_k`.
        values, tokens = self._ranks.gather(values), self._ranks.gather(tokens)
        best, places = ops.top_k(values, k)
        return best, tokens.gather(1, places)
