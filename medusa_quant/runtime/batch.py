"""`LlamaBatch`: continuous batching with speculation; requests join and leave at any step.

A step is one pass of the base over what every running request needs next: a chunk of a prompt, or the
request's last token with a draft tree. Then: verify, compact the cache, and let the heads guess from the
accepted hidden states.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from .candidates import generate_candidates
from .graphs import StepGraphs
from .heads import DraftHeads
from .metrics import Metrics
from .model import LlamaModel, Segment
from .request import Request
from .speculation import Speculation
from .verify import judge
from .work import ROOT_ONLY, Running, Work, rows_to_choose_from


class LlamaBatch:
    """Runs requests on a base, with or without draft heads.

    max_batch: slots. max_len: longest request, prompt and output, in tokens. cache_tokens: tokens all slots
    together may hold (default: max_batch * max_len); where it is exceeded the youngest request is put
    back and recomputed later. prefill_chunk: prompt tokens a step takes in. graphs: whether greedy steps
    go through `StepGraphs` (default: on a GPU, on one rank).
    """

    def __init__(
        self,
        base: LlamaModel,
        heads: DraftHeads | None = None,
        *,
        max_batch: int = 8,
        max_len: int | None = None,
        cache_tokens: int | None = None,
        prefill_chunk: int = 256,
        speculation: Speculation | None = None,
        graphs: bool | None = None,
    ) -> None:
        context = base.config.max_position_embeddings
        self.max_len = min(max_len or context, context)
        for name, value in (
            ("max_batch", max_batch),
            ("max_len", self.max_len),
            ("prefill_chunk", prefill_chunk),
        ):
            if value < 1:
                raise InputError(f"bad {name}", expected="1 or more", found=value)
        self.base, self.heads = base, heads
        self.speculation = speculation or Speculation.named(
            "auto" if heads else "off", "default", heads.num_heads if heads else 0
        )
        for tree in self.speculation.trees:
            tree.check(heads.num_heads if heads else 0, heads.vocab_size if heads else base.config.vocab_size)
        self.cache_tokens = cache_tokens or max_batch * self.max_len
        if self.cache_tokens < self.max_len:
            raise InputError(
                "the cache cannot hold one whole request",
                expected=f"at least max_len {self.max_len} tokens",
                found=self.cache_tokens,
            )
        self.max_batch, self.prefill_chunk, self.metrics = max_batch, prefill_chunk, Metrics()
        # Trees are written behind a request's tokens before they are verified.
        room = max(tree.nodes for tree in self.speculation.trees)
        wanted = base.device.type == "cuda" and base.split.ranks.tp == 1 if graphs is None else graphs
        self._cache = base.new_cache(max_batch + int(wanted), self.max_len + room)
        self._graphs = StepGraphs(base, heads, self._cache, max_batch) if wanted else None
        self._free = list(range(max_batch))[::-1]
        self._waiting: deque[Request] = deque()
        self._running: list[Running] = []
        self._tree = self.speculation.choose(1)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, all slots full."""
        return self._cache.nbytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def check(self, request: Request) -> None:
        """Raise InputError for a prompt that is empty, longer than the context, or not of this base."""
        size, vocab = len(request.prompt), self.base.config.vocab_size
        if not size:
            raise InputError("the prompt is empty", fix="give at least one token")
        if size > self.max_len:
            raise InputError("the prompt is longer than the context", expected=self.max_len, found=size)
        wrong = next((token for token in request.prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InputError("a token id out of range", expected=f"0..{vocab - 1}", found=wrong)

    def add(self, request: Request) -> None:
        """Queue a request; one that may not generate a single token ends at once. Raises as `check`."""
        self.check(request)
        if request.params.max_tokens == 0 or len(request.prompt) == self.max_len:
            request.finish_reason = "length"
        else:
            self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request where it stands; one that has ended already stays as it is."""
        if request.finish_reason is None:
            self._finish(request, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance every running request; returns those that ended."""
        before = [r.request for r in self._running] + list(self._waiting)
        self._expire()
        self._admit()
        started = time.perf_counter()
        works = self._plan()
        tree = self._tree
        if works:
            self._advance(works)
            self.metrics.steps += 1
        # A step that ended with the guesses for another tree tells neither's time.
        if works and all(work.tree is not None for work in works) and self._tree is tree:
            self.speculation.observe(tree, len(works), time.perf_counter() - started)
        return [request for request in before if request.finish_reason is not None]

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [*self._waiting, *(running.request for running in self._running)]:
            if request.deadline is not None and now >= request.deadline:
                self._finish(request, "deadline")

    def _admit(self) -> None:
        # First come, first served: a large request at the head is waited for, not overtaken.
        while self._waiting and self._free and self._room_for(len(self._waiting[0].tokens) + 1):
            self._running.append(Running(self._waiting.popleft(), self._free.pop()))

    def _room_for(self, tokens: int) -> bool:
        return self._held() + tokens <= self.cache_tokens

    def _held(self) -> int:
        return sum(len(running.request.tokens) for running in self._running)

    def _plan(self) -> list[Work]:
        # Every request gains at most the tree's depth and a bonus token.
        while len(self._running) > 1 and self._held() + len(self._running) > self.cache_tokens:
            self._preempt(self._running[-1])
        works, budget = [], self.prefill_chunk
        for running in self._running:
            pending = len(running.request.tokens) - running.cached
            if pending == 1 and running.cached:
                works.append(self._draft(running))
            elif budget > 0:
                size = min(pending, budget)
                budget -= size
                tokens = running.request.tokens[running.cached : running.cached + size]
                works.append(Work(running, torch.tensor(tokens), None, size == pending))
        return works

    def _draft(self, running: Running) -> Work:
        root = torch.tensor(running.request.tokens[-1:])
        tree = self._tree if running.guesses is not None else ROOT_ONLY
        if running.guesses is None or tree.nodes == 1:
            return Work(running, root, ROOT_ONLY, True)
        return Work(running, generate_candidates(root, running.guesses.unsqueeze(0), tree)[0], tree, True)

    def _preempt(self, running: Running) -> None:
        self._release(running)
        running.request.preemptions += 1
        self.metrics.preemptions += 1
        self._waiting.appendleft(running.request)

    def _advance(self, works: Sequence[Work]) -> None:
        if self._graphs is not None and self._graphs.takes(works):
            return self._replay(self._graphs, works)
        hidden = self._run_base(works)
        for work in works:
            if work.tree is None:
                work.running.cached += len(work.tokens)
                self.metrics.prompt_tokens += len(work.tokens)
        started = time.perf_counter()
        choosing, rows = rows_to_choose_from(works)
        chosen = hidden[torch.cat(rows)] if choosing else hidden[:0]
        logits = self.base.logits(chosen) if choosing else hidden[:0]
        self._clock("base", started)
        started = time.perf_counter()
        first = 0
        states: list[tuple[Running, Tensor]] = []
        for work, (node, length, bonus) in zip(choosing, judge(choosing, logits), strict=True):
            if work.tree is not None and work.tree.nodes > 1:
                path = work.tree.paths[node, : length + 1].tolist()
                self.base.compact(self._cache, work.running.slot, work.running.cached, path)
            self._accept(work, node, length, bonus)
            if work.running.request.finish_reason is None:
                states.append((work.running, chosen[first + node]))
            first += work.choices
        self._clock("verify", started)
        self._guess(states)

    def _replay(self, graphs: StepGraphs, works: Sequence[Work]) -> None:
        started = time.perf_counter()
        verdicts, guesses, broken = graphs.run(works)
        if self.heads is not None:
            self.heads.nan_heads |= broken
        tree = works[0].tree or ROOT_ONLY
        for work, verdict in zip(works, verdicts, strict=True):
            self._accept(work, *verdict)
        self._tree = self.speculation.choose(max(1, len(self._running)))
        fits = self._tree.depth <= tree.depth and self._tree.top_k <= tree.top_k
        for row, work in enumerate(works):
            work.running.guesses = guesses[row] if guesses is not None and fits else None
        self._clock("base", started)

    def _run_base(self, works: Sequence[Work]) -> Tensor:
        started = time.perf_counter()
        segments, positions = [], []
        for work in works:
            running, tree = work.running, work.tree
            mask = tree.mask if tree is not None and tree.nodes > 1 else None
            segments.append(Segment(running.slot, running.cached, len(work.tokens), mask))
            steps = torch.arange(len(work.tokens)) if tree is None else tree.depths
            positions.append(running.cached + steps)
        device = self.base.device
        tokens, places = torch.cat([work.tokens for work in works]), torch.cat(positions)
        # Drafts of a tree deeper than the context's end are never accepted; keep their positions valid.
        places = places.clamp(max=self.base.config.max_position_embeddings - 1)
        hidden = self.base.forward(tokens.to(device), places.to(device), segments, self._cache)
        self._clock("base", started)
        return hidden

    def _accept(self, work: Work, node: int, length: int, bonus: int) -> None:
        """Extend the request by the accepted path, which the cache has in place, and the base's token."""
        running, request, tree = work.running, work.running.request, work.tree
        if tree is None:
            self._extend(request, [bonus])
            return
        path = tree.paths[node, : length + 1].tolist()
        if tree.nodes > 1:
            self.metrics.record_draft(tree.nodes, tree.depth, length)
            self.speculation.learn(tree, node)
            request.steps, request.accepted = request.steps + 1, request.accepted + length
        running.cached += len(path)
        self._extend(request, [*work.tokens[path[1:]].tolist(), bonus])

    def _extend(self, request: Request, new: list[int]) -> None:
        """Append tokens up to the first that ends the request."""
        params, taken = request.params, []
        ends = set(params.stop_token_ids) | (
            set() if params.ignore_eos else set(self.base.config.eos_token_ids)
        )
        reason = None
        for token in new:
            taken.append(token)
            request.tokens.append(token)
            if token in ends:
                reason = "stop"
            elif len(request.generated) >= params.max_tokens or len(request.tokens) >= self.max_len:
                reason = "length"
            if reason:
                break
        self.metrics.generation_tokens += len(taken)
        if request.on_tokens is not None:
            request.on_tokens(request, taken)
        # The callback may have ended it (a stop string).
        if reason and request.finish_reason is None:
            self._finish(request, reason)

    def _guess(self, states: Sequence[tuple[Running, Tensor]]) -> None:
        started = time.perf_counter()
        decoding = [pair for pair in states if pair[0].request.finish_reason is None]
        self._tree = self.speculation.choose(max(1, len(decoding)))
        guesses = None
        if self.heads is not None and decoding and self._tree.nodes > 1:
            hidden = torch.stack([state for _, state in decoding])
            guesses = self.heads.guess(hidden, self._tree.top_k, self._tree.depth).cpu()
        for index, (running, _) in enumerate(decoding):
            running.guesses = None if guesses is None else guesses[index]
        self._clock("heads", started)

    def finish(self, request: Request, reason: str) -> None:
        """End a running request from its callback, as a stop string does."""
        self._finish(request, reason)

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        for running in self._running:
            if running.request is request:
                self._release(running)
                return
        if request in self._waiting:
            self._waiting.remove(request)

    def _release(self, running: Running) -> None:
        self._running.remove(running)
        self._free.append(running.slot)

    def _clock(self, part: str, started: float) -> None:
        self.metrics.seconds[part] += time.perf_counter() - started
