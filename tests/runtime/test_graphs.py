"""The step a CUDA graph holds: the loop's own tokens and acceptance, and nothing in it that waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import save_heads
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_quant import load_heads
from medusa_quant.checkpoints.base import base_lm_head
from medusa_quant.runtime import graphs as module
from medusa_quant.runtime.batch import LlamaBatch
from medusa_quant.runtime.heads import DraftHeads
from medusa_quant.runtime.model import KVCache, LlamaModel, load_base
from medusa_quant.runtime.request import Request, SamplingParams
from medusa_quant.runtime.speculation import Speculation

GENERATOR = torch.Generator().manual_seed(9)
PROMPTS = [torch.randint(3, 131, (1 + 7 * n % 19,), generator=GENERATOR).tolist() for n in range(9)]


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> LlamaModel:
    return load_base(tiny_llama)


@pytest.fixture(scope="module")
def heads(base: LlamaModel, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftHeads:
    folder = tmp_path_factory.mktemp("heads") / "h"
    source = save_heads(folder, 3, lm_head=base_lm_head(str(tiny_llama)).dense(), scale=0.02)
    return DraftHeads(load_heads(source), base, "exact")


def _run(
    base: LlamaModel, heads: DraftHeads | None, tree: str, graphs: bool, params: SamplingParams, size: int
) -> tuple[list[Request], LlamaBatch]:
    policy = Speculation.named("tree" if heads else "off", tree, heads.num_heads if heads else 0)
    batch = LlamaBatch(base, heads, speculation=policy, graphs=graphs, max_batch=size, prefill_chunk=8)
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        batch.add(request)
    while batch.has_work:
        batch.step()
    return requests, batch


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of every step that went through `StepGraphs`."""
    counts: list[int] = []
    plain = module.StepGraphs.run

    def run(self: Any, works: Any) -> Any:
        counts.append(len(works))
        return plain(self, works)

    monkeypatch.setattr(module.StepGraphs, "run", run)
    return counts


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("tree", ["chain", "default", "deep", "plain"])
def test_tokens_and_acceptance_are_the_loops_own(
    tree: str, size: int, base: LlamaModel, heads: DraftHeads, taken: list[int]
) -> None:
    given = None if tree == "plain" else heads
    params = SamplingParams(max_tokens=30)
    wanted, plain = _run(base, given, tree, False, params, size)
    assert not taken
    found, batch = _run(base, given, tree, True, params, size)
    assert len(taken) > 10
    assert [request.generated for request in found] == [request.generated for request in wanted]
    assert batch.metrics.accepted_tokens == plain.metrics.accepted_tokens
    assert batch.metrics.drafts == plain.metrics.drafts
    if given is not None:
        assert batch.metrics.accepted_tokens > 0


def test_drawn_tokens_take_the_other_way(base: LlamaModel, heads: DraftHeads, taken: list[int]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    wanted, _ = _run(base, heads, "default", False, params, 3)
    found, _ = _run(base, heads, "default", True, params, 3)
    assert not taken
    assert [request.generated for request in found] == [request.generated for request in wanted]


def test_auto_changes_trees_and_keeps_the_text(base: LlamaModel, heads: DraftHeads) -> None:
    requests = []
    for graphs in (False, True):
        policy = Speculation.named("auto", "default", heads.num_heads)
        batch = LlamaBatch(base, heads, speculation=policy, graphs=graphs, max_batch=4)
        requests.append(
            [Request(str(n), prompt, SamplingParams(max_tokens=60)) for n, prompt in enumerate(PROMPTS)]
        )
        for request in requests[-1]:
            batch.add(request)
        while batch.has_work:
            batch.step()
    assert [request.generated for request in requests[0]] == [request.generated for request in requests[1]]


class _Waits(TorchDispatchMode):
    """Refuses operations whose result the host must wait for, or whose shape depends on values."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in self.refused), f"{name} in a step that is to be captured"
        return func(*args, **(kwargs or {}))


def test_nothing_in_a_step_waits_for_the_device(base: LlamaModel, heads: DraftHeads) -> None:
    policy = Speculation.named("tree", "default", heads.num_heads)
    tree, cache = policy.trees[0], base.new_cache(5, 300)
    base.reserve_positions(300)
    step = module._Step(base, heads, cache, tree, 4, 256, 4)
    # The captured part alone; the mode must be the innermost, under inference mode.
    with torch.inference_mode(), _Waits():
        result = module._Step._run.__wrapped__(step)
    assert result.shape == (4, 3 + tree.depth + tree.depth * tree.top_k)


def test_nan_heads_are_reported(base: LlamaModel, tmp_path: Path) -> None:
    heads = DraftHeads(load_heads(save_heads(tmp_path / "nan", 3, scale=float("nan"))), base, "exact")
    requests, _ = _run(base, heads, "chain", True, SamplingParams(max_tokens=10), 2)
    plain, _ = _run(base, None, "plain", False, SamplingParams(max_tokens=10), 2)
    assert heads.nan_heads == {0, 1, 2}
    assert [request.generated for request in requests] == [request.generated for request in plain]


def test_many_slots_compact_as_one_by_one() -> None:
    one, other = (KVCache(2, 3, 2, 16, 4) for _ in range(2))
    for cache in (one, other):
        generator = torch.Generator().manual_seed(1)
        for part in (*cache.k, *cache.v):
            part.copy_(torch.randn(part.shape, generator=generator))
    paths = torch.tensor([[0, 2, 5], [0, 1, -1], [0, -1, -1]])
    starts, lengths = torch.tensor([3, 7, 0]), torch.tensor([2, 1, 0])
    one.compact_rows(torch.tensor([2, 0, 1]), starts, paths, lengths)
    for slot, start, path, length in zip((2, 0, 1), starts.tolist(), paths, lengths.tolist(), strict=True):
        other.compact(slot, start, path[: length + 1].tolist())
    for found, wanted in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
        assert torch.equal(found, wanted)
