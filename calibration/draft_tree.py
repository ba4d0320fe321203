"""The draft tree that suits these heads, from how often each of their guesses is right."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.tree import Choice, best_choices
from .acceptance import accepted_lengths


def conditional_rates(ranks: Tensor, top_k: int) -> list[list[float]]:
    """rates[head][rank]: how often the base's token is the head's rank-th guess, where all earlier heads had
    theirs among their top_k best, as a draft that deep needs them to.

    ranks: int64 [P, heads], places of the base's tokens (`Report.ranks`). Heads after one that is never
    right have no rates.
    """
    rates: list[list[float]] = []
    reached = torch.ones(ranks.shape[0], dtype=torch.bool)
    for head in range(ranks.shape[1]):
        count = int(reached.sum())
        if not count:
            break
        found = ranks[reached, head]
        rates.append([int((found == rank).sum()) / count for rank in range(top_k)])
        reached &= ranks[:, head] < top_k
    return rates


def choose_tree(ranks: Tensor, nodes: int, top_k: int) -> list[Choice]:
    """The tree of at most `nodes` nodes (root included) with the largest expected acceptance; see
    `best_choices`. Nodes that were never right are left out: a step would pay for them."""
    # Siblings are taken by rank, so rates must not rise with it; small samples do.
    rates = [sorted(head, reverse=True) for head in conditional_rates(ranks, top_k)]
    reachable = [[rate for rate in head if rate > 0] for head in rates]
    depth = next((head for head, found in enumerate(reachable) if not found), len(reachable))
    return best_choices(reachable[:depth], nodes)


def expected_acceptance(ranks: Tensor, choices: list[Choice]) -> float:
    """Mean tokens a step yields with this tree on these states, the base's own token included."""
    return float(accepted_lengths(ranks, choices).double().mean())
