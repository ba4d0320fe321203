"""Running the base over a batch of prompts: final hidden states, and the tokens the base itself chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import ops
from ..runtime.model import KVCache, LlamaModel, Segment

# (numbers of the prompts, step, ids [n, k], logits [n, k], best first) -> the place of the next token of each
Pick = Callable[[Sequence[int], int, Tensor, Tensor], Tensor]

# Prompt tokens per forward call: bounds the memory of a prefill.
_CHUNK = 512


@dataclass(frozen=True)
class Trace:
    """States of one prompt, in order.

    states: fp32 [n, H]. chosen: int32 [n], the token that followed: the base's argmax, or drawn.
    top_ids, top_logits: int32 / fp32 [n, k], its largest logits.
    """

    states: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_logits: Tensor

    def next_tokens(self, depth: int) -> Tensor:
        """int32 [n, depth]: the base's tokens t+1, t+2, ... after each state, -1 beyond the last."""
        count = self.chosen.numel()
        padded = torch.cat([self.chosen, self.chosen.new_full((depth,), -1)])
        return padded.unfold(0, depth, 1)[:count].contiguous()

    def first(self, count: int) -> Trace:
        """The first states only; tokens chosen after the last of them are forgotten."""
        return Trace(*(part[:count] for part in vars(self).values()))


def greedy(prompts: Sequence[int], step: int, ids: Tensor, logits: Tensor) -> Tensor:
    """The `Pick` of greedy decoding."""
    return torch.zeros(len(prompts), dtype=torch.int64)


def continuation_traces(
    model: LlamaModel, prompts: list[list[int]], max_new_tokens: int, top: int, pick: Pick = greedy
) -> list[Trace]:
    """The base's own continuations: states of the last prompt token and of every token it wrote.

    prompts: token ids, one non-empty list each. A continuation ends with an end-of-text token (whose own
    state no head ever sees) or after max_new_tokens. pick: among the `top` likeliest tokens.
    """
    longest = max(len(tokens) for tokens in prompts)
    cache = model.new_cache(len(prompts), longest + max_new_tokens)
    hidden = torch.stack([_prefill(model, cache, slot, tokens)[-1] for slot, tokens in enumerate(prompts)])
    pieces: list[list[tuple[Tensor, ...]]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    for step in range(max_new_tokens):
        ids, logits = _top(model, hidden, top)
        chosen = ids.gather(1, pick(active, step, ids, logits).unsqueeze(1)).squeeze(1)
        for row, slot in enumerate(active):
            pieces[slot].append((hidden[row], chosen[row], ids[row], logits[row]))
        going = [row for row, token in enumerate(chosen.tolist()) if token not in model.config.eos_token_ids]
        active = [active[row] for row in going]
        if not active or step == max_new_tokens - 1:
            break
        starts = [len(prompts[slot]) + step for slot in active]
        segments = [Segment(slot, start, 1) for slot, start in zip(active, starts, strict=True)]
        hidden = model.forward(chosen[going].long(), torch.tensor(starts), segments, cache)
    return [Trace(*(torch.stack(column) for column in zip(*rows, strict=True))) for rows in pieces]


def text_traces(model: LlamaModel, texts: list[list[int]], top: int) -> list[Trace]:
    """Teacher-forced: states of every token of given texts, with what the base would choose after each."""
    traces = []
    for tokens in texts:
        cache = model.new_cache(1, len(tokens))
        states = _prefill(model, cache, 0, tokens)
        tops = [_top(model, block, top) for block in states.split(_CHUNK)]
        ids, logits = torch.cat([t[0] for t in tops]), torch.cat([t[1] for t in tops])
        traces.append(Trace(states, ids[:, 0].clone(), ids, logits))
    return traces


def _prefill(model: LlamaModel, cache: KVCache, slot: int, tokens: list[int]) -> Tensor:
    states = []
    for start in range(0, len(tokens), _CHUNK):
        piece = torch.tensor(tokens[start : start + _CHUNK])
        positions = torch.arange(start, start + len(piece))
        states.append(model.forward(piece, positions, [Segment(slot, start, len(piece))], cache))
    return torch.cat(states).float()


def _top(model: LlamaModel, hidden: Tensor, top: int) -> tuple[Tensor, Tensor]:
    logits = model.logits(hidden)
    values, ids = ops.top_k(logits, min(top, logits.shape[1]))
    return ids.to(torch.int32), values
