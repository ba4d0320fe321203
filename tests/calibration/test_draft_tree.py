"""Trees chosen from measured ranks: rates, growth, and the `tree` command."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from medusa_quant.calibration.draft_tree import choose_tree, conditional_rates, expected_acceptance
from medusa_quant.runtime.tree import Tree


def _ranks(rows: int = 4000, seed: int = 0) -> torch.Tensor:
    """Independent heads: head h's rank r with a chance of its own, falling with r."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.tensor([[0.5, 0.2, 0.1, 0.2], [0.35, 0.2, 0.05, 0.4]])
    return torch.stack([torch.multinomial(c, rows, True, generator=generator) for c in chances], 1)


def test_rates_are_conditional_on_the_earlier_heads() -> None:
    # Head 1 is right only where head 0 was: unconditionally half of the time, conditionally always.
    ranks = torch.tensor([[0, 0], [0, 0], [9, 9], [9, 9]])
    assert conditional_rates(ranks, 2) == [[0.5, 0.0], [1.0, 0.0]]
    assert conditional_rates(torch.tensor([[9, 0]]), 2) == [[0.0, 0.0]]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_no_other_tree_of_that_size_expects_more(nodes: int) -> None:
    ranks = _ranks()
    chosen = choose_tree(ranks, nodes, 3)
    assert len(chosen) + 1 == nodes
    everything = [(r,) for r in range(3)] + list(product(range(3), range(3)))
    best = max(expected_acceptance(ranks, list(tree)) for tree in _subsets(everything, nodes - 1))
    # Heads of the sample are independent but for chance.
    assert expected_acceptance(ranks, chosen) >= best - 0.02


def _subsets(nodes: list[tuple[int, ...]], size: int) -> list[tuple[tuple[int, ...], ...]]:
    from itertools import combinations

    return [
        chosen
        for chosen in combinations(nodes, size)
        if all(node[:-1] in chosen for node in chosen if len(node) > 1)
    ]


def test_guesses_that_were_never_right_are_left_out() -> None:
    ranks = torch.tensor([[0, 99], [0, 99], [1, 99]])
    assert sorted(choose_tree(ranks, 50, 10)) == [(0,), (1,)]
    assert choose_tree(torch.full((3, 2), 99), 50, 10) == []
    Tree.of(choose_tree(_ranks(), 256, 3))
