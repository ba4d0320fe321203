"""`Split`: which parts of a base are divided over the ranks.

Every divided matrix is divided on its outputs, and ranks gather those. Dividing o and down on their inputs
(Megatron-LM, Shoeybi et al. 2019) would halve the exchanges, but adds partial sums, whose rounding depends on
tp: the text could then depend on it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ranks import ALONE, Ranks
from .config import ModelConfig
from .linear import Linear


@dataclass(frozen=True)
class Split:
    """attention: by key-value heads, with their share of the cache. mlp: by inner features. What tp does not
    divide stays whole on every rank."""

    ranks: Ranks = ALONE
    attention: bool = False
    mlp: bool = False

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks) -> Split:
        """The largest one this model's sizes allow."""
        if ranks.tp == 1:
            return WHOLE_MODEL
        hidden = config.hidden_size % ranks.tp == 0
        return cls(
            ranks,
            hidden and config.num_kv_heads % ranks.tp == 0,
            hidden and config.intermediate_size % ranks.tp == 0,
        )

    def share(self, size: int, divided: bool) -> int:
        return size // self.ranks.tp if divided else size

    def rows(self, matrix: Tensor, divided: bool) -> Tensor:
        """This rank's outputs of a matrix [N, K] or bias [N]."""
        return matrix[self.ranks.mine(matrix.shape[0])] if divided else matrix

    def project(self, linear: Linear, inputs: Tensor, residual: Tensor, divided: bool) -> Tensor:
        """linear(inputs) + residual, whole on every rank; of a divided part, inputs are this rank's."""
        if not divided:
            return linear(inputs, residual=residual)
        own = residual[:, self.ranks.mine(residual.shape[1])].contiguous()
        return self.ranks.gather(linear(self.ranks.gather(inputs), residual=own))


WHOLE_MODEL = Split()
