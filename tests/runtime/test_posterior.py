"""Verification against slow Python written from its description, and the distribution of sampled text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_quant.runtime.posterior import evaluate_posterior, evaluate_typical
from medusa_quant.runtime.sampling import draw, probabilities, uniform
from medusa_quant.runtime.tree import Tree, named_tree

TREES = [named_tree(name, 3) for name in ("none", "chain", "default", "deep")]


def slow(tokens: list[int], tree: Tree, passes: object) -> tuple[int, int]:
    """(node, drafts accepted): try every path in order, keep the first longest."""
    best, longest = 0, 0
    for node in range(tree.nodes):
        path = [int(at) for at in tree.paths[node] if at >= 0]
        if all(passes(path[i], path[i + 1]) for i in range(len(path) - 1)) and len(path) - 1 > longest:  # type: ignore[operator]
            best, longest = node, len(path) - 1
    return best, longest


@settings(deadline=None)
@given(st.sampled_from(TREES), st.integers(0, 1000), st.integers(1, 3))
def test_exact(tree: Tree, seed: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (batch, tree.nodes), generator=generator)
    base = torch.randint(0, 3, (batch, tree.nodes), generator=generator)
    verdict = evaluate_posterior(tokens, base, tree)
    for row in range(batch):
        t, b = tokens[row].tolist(), base[row].tolist()
        node, length = slow(t, tree, lambda parent, child, t=t, b=b: t[child] == b[parent])
        assert (int(verdict.node[row]), int(verdict.length[row])) == (node, length)
        assert int(verdict.bonus[row]) == b[node]


@settings(deadline=None)
@given(st.sampled_from(TREES), st.integers(0, 1000), st.floats(0.01, 0.9), st.floats(0.05, 1.0))
def test_typical(tree: Tree, seed: int, eps: float, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 4, (1, tree.nodes), generator=generator)
    chances = torch.softmax(torch.randn(1, tree.nodes, 4, generator=generator, dtype=torch.float64) * 2, -1)
    base = torch.randint(0, 4, (1, tree.nodes), generator=generator)
    verdict = evaluate_typical(tokens, chances, base, tree, eps, alpha)

    def passes(parent: int, child: int) -> bool:
        p = chances[0, parent].tolist()
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        return p[int(tokens[0, child])] > min(eps, alpha * math.exp(-entropy))

    node, length = slow(tokens[0].tolist(), tree, passes)
    assert (int(verdict.node), int(verdict.length), int(verdict.bonus)) == (node, length, int(base[0, node]))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected chances, cells below 5 expected joined."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    total = counts.sum()
    mean = expected * total
    rare = mean < 5
    seen = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    wanted = torch.cat([mean[~rare], mean[rare].sum().view(1)])
    keep = wanted > 0
    return float(stats.chisquare(seen[keep].numpy(), wanted[keep].numpy()).pvalue)


@pytest.mark.parametrize("quality", ["good", "bad"])
def test_sampling_keeps_the_joint_distribution_of_three_tokens(quality: str) -> None:
    """A Markov chain stands for the base; drafts come from its likeliest tokens, or from its least likely."""
    vocab, count = 4, 6000
    generator = torch.Generator().manual_seed(5)
    table = torch.softmax(torch.randn(vocab, vocab, generator=generator, dtype=torch.float64) * 1.2, -1)
    order = table.argsort(-1, descending=quality == "good")
    tree = Tree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    seen = torch.zeros(vocab, vocab, vocab)
    for seed in range(count):
        text = [0]
        while len(text) < 4:
            tokens = [text[-1]]
            for node in range(1, tree.nodes):
                tokens.append(int(order[tokens[int(tree.parents[node])], int(tree.ranks[node])]))
            numbers = [uniform(seed, len(text) + depth) for depth in tree.depths.tolist()]
            drawn = draw(table[tokens], torch.tensor(numbers, dtype=torch.float64))
            verdict = evaluate_posterior(torch.tensor([tokens]), drawn[None], tree)
            path = tree.paths[int(verdict.node), : int(verdict.length) + 1].tolist()
            text += [tokens[node] for node in path[1:]] + [int(verdict.bonus)]
        seen[tuple(text[1:4])] += 1
    expected = table[0][:, None, None] * table[:, :, None] * table[None, :, :]
    assert chi_square(seen.flatten(), expected.flatten()) > 1e-3


def test_draw_follows_its_chances() -> None:
    chances = torch.tensor([[0.1, 0.0, 0.6, 0.3]], dtype=torch.float64).expand(20000, 4)
    numbers = torch.tensor([uniform(3, position) for position in range(20000)], dtype=torch.float64)
    counts = torch.bincount(draw(chances, numbers), minlength=4).double()
    assert counts[1] == 0
    assert chi_square(counts, chances[0]) > 1e-3
    edge = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    for number in (0.0, 0.999999999999999999):
        assert int(draw(edge, torch.tensor([number], dtype=torch.float64))) == 1


def test_cuts_and_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    full = torch.softmax(logits.double() / 0.7, -1)
    assert torch.allclose(probabilities(logits, 0.7), full)
    top2 = probabilities(logits, 0.7, top_k=2)
    assert top2[0, [0, 3]].tolist() == [0.0, 0.0]
    assert torch.allclose(top2[0, [1, 2]], full[0, [1, 2]] / full[0, [1, 2]].sum())
    nucleus = probabilities(logits, 1.0, top_p=0.5)
    assert nucleus[0].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_numbers_depend_on_seed_and_position_only() -> None:
    values = {(seed, position): uniform(seed, position) for seed in range(20) for position in range(50)}
    assert len(set(values.values())) == 1000
    assert all(0.0 <= value < 1.0 for value in values.values())
    assert uniform(7, 9) == values[7, 9]
