"""A greedy speculative step as tensors only: on a GPU one CUDA graph per (batch bucket, tree, span of keys).

The host writes one tensor before a step and reads one after it, and waits for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import ops
from .heads import DraftHeads
from .model import KVCache, LlamaModel, TreeRows
from .posterior import evaluate_posterior
from .tree import Choice, Tree
from .work import Work

# Keys a step looks at come in this many, doubled as requests grow.
_SHORTEST_SPAN = 256
_WARM_UPS = 3
# Trees grown from learned chances change: the oldest graph makes room.
_MOST_STEPS = 64


class StepResult(NamedTuple):
    """verdicts: (last accepted node, drafts accepted, next token) of each request. guesses: int64
    [requests, depth, top_k] on the host, None without heads. broken: heads that gave NaN."""

    verdicts: list[tuple[int, int, int]]
    guesses: Tensor | None
    broken: set[int]


class StepGraphs:
    """The steps captured so far. spare_slot: a cache slot that no request uses, for rows that fill a bucket.

    On the CPU the same functions run without a graph.
    """

    def __init__(self, base: LlamaModel, heads: DraftHeads | None, cache: KVCache, spare_slot: int) -> None:
        self._base, self._heads, self._cache, self._spare = base, heads, cache, spare_slot
        self._steps: dict[tuple[int, tuple[Choice, ...], int], _Step] = {}
        base.reserve_positions(cache.max_len)

    def takes(self, works: Sequence[Work]) -> bool:
        """Whether these are requests that verify one and the same tree greedily."""
        tree = works[0].tree
        if tree is None or (tree.nodes == 1 and self._heads is not None):
            return False
        return all(work.tree is tree and work.running.request.params.greedy for work in works)

    def run(self, works: Sequence[Work]) -> StepResult:
        """Verify, compact the cache and guess again."""
        tree = works[0].tree
        assert tree is not None
        rows = 1 << (len(works) - 1).bit_length()
        longest = max(work.running.cached for work in works) + tree.nodes
        span = min(
            _SHORTEST_SPAN << max(0, -(-longest // _SHORTEST_SPAN) - 1).bit_length(), self._cache.max_len
        )
        key = (rows, tree.choices, span)
        if key not in self._steps:
            if len(self._steps) >= _MOST_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = _Step(self._base, self._heads, self._cache, tree, rows, span, self._spare)
        filled = torch.zeros((rows, 2 + tree.nodes), dtype=torch.int64)
        filled[:, 0] = self._spare
        for row, work in enumerate(works):
            filled[row, 0], filled[row, 1] = work.running.slot, work.running.cached
            filled[row, 2:] = work.tokens
        result = self._steps[key](filled)[: len(works)]
        verdicts = [(node, length, bonus) for node, length, bonus in result[:, :3].tolist()]
        if self._heads is None:
            return StepResult(verdicts, None, set())
        broken = set(result[0, 3 : 3 + tree.depth].nonzero().flatten().tolist())
        guesses = result[:, 3 + tree.depth :].view(len(works), tree.depth, tree.top_k)
        return StepResult(verdicts, guesses, broken)


class _Step:
    """One shape of step. Input int64 [rows, 2 + nodes]: slot, rows cached, tokens of the tree. Output int64
    [rows, 3 (+ depth + depth * top_k)]: node, length, bonus, whether heads are broken, guesses."""

    def __init__(
        self,
        base: LlamaModel,
        heads: DraftHeads | None,
        cache: KVCache,
        tree: Tree,
        rows: int,
        span: int,
        spare_slot: int,
    ) -> None:
        self._base, self._heads, self._cache, self._span = base, heads, cache, span
        self._depth, self._top_k = tree.depth, tree.top_k
        self._tree = tree.to(base.device)
        self._input = torch.zeros((rows, 2 + tree.nodes), dtype=torch.int64, device=base.device)
        self._input[:, 0] = spare_slot
        self._graph: torch.cuda.CUDAGraph | None = None
        if base.device.type == "cuda":
            self._capture()

    def __call__(self, filled: Tensor) -> Tensor:
        if self._graph is None:
            self._input.copy_(filled)
            return self._run()
        self._input.copy_(filled.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._output.cpu()  # the one wait of a step

    @torch.inference_mode()
    def _capture(self) -> None:
        # Kernels compile and allocate on their first runs, which a capture must not see.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._run()

    @torch.inference_mode()
    def _run(self) -> Tensor:
        base, tree = self._base, self._tree
        slot, start, tokens = self._input[:, 0], self._input[:, 1], self._input[:, 2:]
        places = (start.unsqueeze(1) + tree.depths).clamp(max=base.config.max_position_embeddings - 1)
        rows = TreeRows(slot, start, tree.mask, self._span)
        hidden = base.forward(tokens.flatten(), places.flatten(), rows, self._cache)
        own = ops.argmax(base.logits(hidden)).view_as(tokens)
        node, length, bonus = evaluate_posterior(tokens, own, tree)
        self._cache.compact_rows(slot, start, tree.paths[node], length)
        parts = [torch.stack([node, length, bonus], 1)]
        if self._heads is not None:
            states = hidden.view(*tokens.shape, -1)[torch.arange(len(slot), device=slot.device), node]
            guesses, broken = self._heads.propose(states, self._top_k, self._depth)
            parts += [broken.long().expand(len(slot), -1), guesses.flatten(1)]
        return torch.cat(parts, 1)
