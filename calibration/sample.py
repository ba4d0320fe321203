"""A bounded random sample of rows from a stream, the same whatever the order and size of its pieces."""

from __future__ import annotations

import torch
from torch import Tensor


class BottomKSample:
    """Keeps the `capacity` rows with the smallest priorities (bottom-k sampling, Cohen and Kaplan 2007).

    Priorities are drawn from (seed, stream number) alone, so that a resumed run keeps the same rows.
    columns: named tensors [n, ...] that belong together; all pieces must have the same ones.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seed = capacity, seed
        self.columns: dict[str, Tensor] = {}

    def add(self, stream: int, columns: dict[str, Tensor]) -> None:
        """Take in the rows of one stream (a prompt), all at once."""
        rows = next(iter(columns.values())).shape[0]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + stream)
        priority = torch.rand(rows, dtype=torch.float64, generator=generator)
        new = {**columns, "priority": priority}
        merged = {
            name: torch.cat([self.columns[name], part]) if self.columns else part.clone()
            for name, part in new.items()
        }
        if merged["priority"].numel() > self.capacity:
            kept = merged["priority"].argsort(stable=True)[: self.capacity].sort().values
            merged = {name: part[kept] for name, part in merged.items()}
        self.columns = merged
