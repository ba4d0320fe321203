"""How far stored weights are from their source."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class WeightError:
    """Error of a stored tensor, accumulated block by block in fp64.

    relative: ||stored - source||_F / ||source||_F (0 for an all-zero source stored exactly).
    max: largest absolute difference.
    """

    def __init__(self) -> None:
        self._difference = 0.0
        self._norm = 0.0
        self.max = 0.0

    def add(self, source: Tensor, stored: Tensor) -> None:
        """Take in one block: two float tensors of the same shape, any float dtype, finite."""
        if not source.numel():
            return
        self.add_difference(source.float(), source.float() - stored.float())

    def add_difference(self, source: Tensor, difference: Tensor) -> None:
        """As `add`, for a block whose difference (source - stored, or its negative) is at hand, in fp32."""
        low, high = difference.aminmax()
        self.max = max(self.max, -float(low), float(high))
        self._difference = math.hypot(self._difference, _norm(difference))
        self._norm = math.hypot(self._norm, _norm(source))

    @property
    def relative(self) -> float:
        if self._difference == 0.0:
            return 0.0
        return self._difference / self._norm if self._norm else math.inf

    def as_dict(self) -> dict[str, float]:
        return {"relative": self.relative, "max": self.max}


def _norm(values: Tensor) -> float:
    flat = values.reshape(-1)
    norm = math.sqrt(float(torch.dot(flat, flat)))
    # fp32 squares leave their range for values beyond about 1e19 or below 1e-19.
    if not 1e-15 < norm < 1e15:
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm
