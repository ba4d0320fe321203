"""What a step costs on this machine: a pass over every request's tree, its verdict, and the heads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ..kernels import ops
from .heads import DraftHeads
from .model import LlamaModel, Segment
from .tree import Tree

# Tokens before the trees: attention's share at a typical length.
_CONTEXT = 128
_REPEATS = 9


@torch.inference_mode()
def step_seconds(base: LlamaModel, heads: DraftHeads, trees: Sequence[Tree], batch: int) -> list[float]:
    """Median seconds of a step of `batch` requests that all draft each of `trees`.

    The trees take turns, so that a drift of the machine hits all alike. One of the root alone pays for no
    heads, as in plain decoding.
    """
    room = max(tree.nodes for tree in trees)
    cache = base.new_cache(batch, _CONTEXT + room)
    hidden = torch.randn(batch, base.config.hidden_size).to(base.device, base.activation_dtype)
    times: list[list[float]] = [[] for _ in trees]
    for repeat in range(_REPEATS + 1):
        for tree, measured in zip(trees, times, strict=True):
            started = time.perf_counter()
            mask = tree.mask if tree.nodes > 1 else None
            segments = [Segment(slot, _CONTEXT, tree.nodes, mask) for slot in range(batch)]
            tokens = torch.arange(batch * tree.nodes, device=base.device) % base.config.vocab_size
            positions = (_CONTEXT + tree.depths).repeat(batch).to(base.device)
            ops.argmax(base.logits(base.forward(tokens, positions, segments, cache))).cpu()
            if tree.nodes > 1:
                heads.guess(hidden, tree.top_k, tree.depth).cpu()
            # The first turn warms caches and kernels up.
            if repeat:
                measured.append(time.perf_counter() - started)
    return [statistics.median(measured) for measured in times]
