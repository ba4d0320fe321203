"""Slot KV cache: each running request owns one slot; tree rows are appended, then compacted in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one request in a batch: query i is written at cache position start + i.

    It sees positions [0, start) of its slot and, within the segment, tokens j <= i (causal), or exactly
    those where tree_mask[i, j] is true (bool [count, count]; the diagonal must be true).
    """

    slot: int
    start: int
    count: int
    tree_mask: Tensor | None = None


class KVCache:
    """Keys (after rope) and values of all layers: two tensors [layers, slots, kv_heads, max_len, head_dim].

    `k` and `v` list the layers' views [slots, kv_heads, max_len, head_dim]. Rows never written take no
    memory until touched. number: which of its model's caches this is, alike on every rank.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        number: int = 0,
    ) -> None:
        shape = (layers, slots, kv_heads, max_len, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.k, self.v = list(self._k.unbind(0)), list(self._v.unbind(0))
        self.slots, self.max_len, self.number = slots, max_len, number

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def compact(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Keep the accepted path of a tree: row start + path[j] moves to start + j; no other row changes.

        path: strictly increasing node numbers (a node's parent comes before it). Raises ValueError else.
        """
        if any(b <= a for a, b in pairwise(path)) or (path and path[0] < 0):
            raise ValueError(f"path must be strictly increasing, got {list(path)}")
        if path and start + path[-1] >= self.max_len:
            raise ValueError(f"path ends at row {start + path[-1]}, the cache has {self.max_len}")
        moved = [(node, place) for place, node in enumerate(path) if node != place]
        if not moved:
            return
        # Strictly increasing, so that all that moves is a suffix of the path.
        first = moved[0][1]
        sources = torch.tensor([start + node for node, _ in moved], device=self._k.device)
        rows = slice(start + first, start + len(path))
        for stored in (self._k, self._v):
            stored[:, slot, :, rows] = stored[:, slot].index_select(2, sources)

    def compact_rows(self, slot: Tensor, start: Tensor, paths: Tensor, length: Tensor) -> None:
        """`compact` for one tree in B slots, by tensors alone.

        slot, start: int64 [B]. paths: int64 [B, depth + 1], nodes of the deepest path, -1 beyond its end.
        length: int64 [B]: nodes after the root that are kept; rows behind them stay as they are.
        """
        steps = torch.arange(paths.shape[1], device=paths.device)
        target = start.unsqueeze(1) + steps
        source = torch.where(steps <= length.unsqueeze(1), start.unsqueeze(1) + paths.clamp(min=0), target)
        for stored in (self._k, self._v):
            stored[:, slot.unsqueeze(1), :, target] = stored[:, slot.unsqueeze(1), :, source]
