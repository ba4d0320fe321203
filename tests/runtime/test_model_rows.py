"""A token's hidden state and logits are the same bits whatever else is in its batch.

Greedy text under speculation equals plain greedy text only if verification computes what plain decoding
computes: these tests are the ground that token identity stands on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_quant.runtime.model import KVCache, LlamaModel, Segment, load_base

STORED = [("fp32", "exact"), ("bf16", "exact"), ("int8", "int8"), ("int8", "exact"), ("int4", "int8")]
IDS = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1))
# Two children of the root, then one chain below each: depth is not the node's number.
PARENTS = [-1, 0, 0, 1, 2, 4]


@pytest.fixture(scope="module", params=STORED, ids=lambda value: "-".join(value))
def model(request: pytest.FixtureRequest, tiny_llama: Path) -> LlamaModel:
    dtype, activation = request.param
    return load_base(tiny_llama, dtype, activation=activation)


def plain(model: LlamaModel, ids: torch.Tensor, cache: KVCache | None = None, slot: int = 0) -> torch.Tensor:
    """Hidden states [S, H] of one token at a time."""
    cache = cache or model.new_cache(1, 64)
    rows = [
        model.forward(ids[place : place + 1], torch.tensor([place]), [Segment(slot, place, 1)], cache).clone()
        for place in range(len(ids))
    ]
    return torch.cat(rows)


def assert_same(model: LlamaModel, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got, expected)
    assert torch.equal(model.logits(got), torch.cat([model.logits(row) for row in expected.split(1)]))


@pytest.mark.parametrize("chunks", [[40], [1, 39], [7, 7, 7, 7, 7, 5], [16, 17, 7], [33, 1, 1, 5]], ids=str)
def test_prefill_chunks_equal_single_steps(model: LlamaModel, chunks: list[int]) -> None:
    cache, start, rows = model.new_cache(2, 64), 0, []
    for count in chunks:
        places = torch.arange(start, start + count)
        rows.append(model.forward(IDS[places], places, [Segment(1, start, count)], cache).clone())
        start += count
    assert_same(model, torch.cat(rows), plain(model, IDS))


@pytest.mark.parametrize("batch", [2, 7, 32])
def test_neighbours_change_nothing(model: LlamaModel, batch: int) -> None:
    """Each slot decodes the same text at another place, beside slots that prefill."""
    expected = plain(model, IDS)
    cache = model.new_cache(batch, 64)
    lengths = [1 + slot % 30 for slot in range(batch)]
    for slot, length in enumerate(lengths):
        places = torch.arange(length)
        model.forward(IDS[:length], places, [Segment(slot, 0, length)], cache)
    counts = [1 if slot % 3 else 4 for slot in range(batch)]
    segments = [Segment(slot, lengths[slot], counts[slot]) for slot in range(batch)]
    places = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
    got = model.forward(IDS[places], places, segments, cache)
    assert_same(model, got, expected[places])


def tree_mask(parents: list[int]) -> torch.Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def depths(parents: list[int]) -> list[int]:
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


def test_tree_nodes_equal_plain_decoding_of_their_path(model: LlamaModel) -> None:
    start, tree = 20, PARENTS
    tokens = torch.randint(0, 131, (len(tree),), generator=torch.Generator().manual_seed(5))
    cache = model.new_cache(2, 64)
    model.forward(IDS[:start], torch.arange(start), [Segment(1, 0, start)], cache)
    places = torch.tensor([start + depth for depth in depths(tree)])
    got = model.forward(tokens, places, [Segment(1, start, len(tree), tree_mask(tree))], cache).clone()
    for leaf in range(len(tree)):
        path = tree_mask(tree)[leaf].nonzero().flatten()
        expected = plain(model, torch.cat([IDS[:start], tokens[path]]))
        assert_same(model, got[path], expected[start:])


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_speculation_then_compaction_equals_plain_decoding(tiny_llama: Path, data: st.DataObject) -> None:
    """Random trees, an accepted path each, several rounds: what follows is as if decoded plainly."""
    model = load_base(tiny_llama, "int8")
    cache, text = model.new_cache(1, 96), IDS[:9].tolist()
    model.forward(IDS[:9], torch.arange(9), [Segment(0, 0, 9)], cache)
    for _ in range(3):
        count = data.draw(st.integers(1, 9))
        parents = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, count)]
        tokens = torch.tensor(data.draw(st.lists(st.integers(0, 130), min_size=count, max_size=count)))
        start = len(text)
        places = torch.tensor([start + depth for depth in depths(parents)])
        segment = Segment(0, start, count, tree_mask(parents))
        model.forward(tokens, places, [segment], cache)
        path = tree_mask(parents)[data.draw(st.integers(0, count - 1))].nonzero().flatten().tolist()
        cache.compact(0, start, path)
        text += tokens[path].tolist()
    last = torch.tensor([17])
    got = model.forward(last, torch.tensor([len(text)]), [Segment(0, len(text), 1)], cache)
    assert torch.equal(got, plain(model, torch.tensor([*text, 17]), model.new_cache(1, 96))[-1:])


def test_thread_count_changes_nothing(model: LlamaModel) -> None:
    before = torch.get_num_threads()
    places = torch.arange(len(IDS))
    try:
        torch.set_num_threads(1)
        one = model.forward(IDS, places, [Segment(0, 0, len(IDS))], model.new_cache(1, 64)).clone()
        torch.set_num_threads(2)
        two = model.forward(IDS, places, [Segment(0, 0, len(IDS))], model.new_cache(1, 64))
        assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)
