"""The slot cache: writing and compacting touch exactly the rows they should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_quant.runtime.model import KVCache


def filled_cache() -> KVCache:
    cache = KVCache(layers=2, slots=3, kv_heads=2, max_len=12, head_dim=4)
    for index, tensor in enumerate(cache.k + cache.v):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 1000.0 * index)
    return cache


@settings(deadline=None, max_examples=50)
@given(
    slot=st.integers(0, 2), start=st.integers(0, 5), nodes=st.sets(st.integers(0, 6), max_size=7).map(sorted)
)
def test_compact_moves_the_path_and_nothing_else(slot: int, start: int, nodes: list[int]) -> None:
    cache, before = filled_cache(), filled_cache()
    cache.compact(slot, start, nodes)
    for tensor, old in zip(cache.k + cache.v, before.k + before.v, strict=True):
        expected = old.clone()
        for place, node in enumerate(nodes):
            expected[slot, :, start + place] = old[slot, :, start + node]
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("path", [[1, 1], [2, 1], [-1, 0], [0, 9]])
def test_compact_refuses_what_is_no_path(path: list[int]) -> None:
    with pytest.raises(ValueError, match="path"):
        filled_cache().compact(0, 4, path)


def test_compact_up_to_the_last_row() -> None:
    cache = filled_cache()
    expected = cache.k[1][2, :, 11].clone()
    cache.compact(2, 10, [1])
    assert torch.equal(cache.k[1][2, :, 10], expected)


def test_nbytes_counts_keys_and_values() -> None:
    assert filled_cache().nbytes == 2 * (2 * 3 * 2 * 12 * 4) * 4
