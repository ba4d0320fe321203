"""Predicted acceptance: how many tokens a draft tree would gain at each held-out state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Tree = Sequence[tuple[int, ...]]


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """int64 [P]: the place (0 = best) of each row's token among its logits [P, V]; ties count as before it.

    tokens: int64 [P], all within the vocabulary.
    """
    own = logits.gather(1, tokens.unsqueeze(1))
    better = (logits >= own).sum(1)
    return better - 1


def accepted_lengths(ranks: Tensor, tree: Tree) -> Tensor:
    """int64 [P]: tokens gained per step with this tree, the base's own (bonus) token included.

    ranks: int64 [P, heads], the place of the base's token t+2+i in head i's logits. tree: choices as the
    runtime has them: (r0, r1, ...) stands for taking head 0's r0-th best, then head 1's r1-th best.
    """
    matched = torch.zeros(ranks.shape[0], dtype=torch.int64)
    for node in tree:
        hit = torch.ones(ranks.shape[0], dtype=torch.bool)
        for head, rank in enumerate(node):
            hit &= ranks[:, head] == rank
        matched = torch.where(hit, matched.clamp(min=len(node)), matched)
    return matched + 1


def greedy_chain(num_heads: int) -> list[tuple[int, ...]]:
    """The tree that drafts each head's best token only."""
    return [(0,) * depth for depth in range(1, num_heads + 1)]
