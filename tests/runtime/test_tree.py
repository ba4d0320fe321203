"""Draft trees: structure, files, and the choice of the most promising nodes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_quant.errors import InputError
from medusa_quant.runtime.candidates import generate_candidates
from medusa_quant.runtime.tree import Tree, best_choices, chain, load_tree, named_tree


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=25))
def test_structure(picked: list[tuple[int, ...]]) -> None:
    choices = {choice[: depth + 1] for choice in picked for depth in range(len(choice))}
    tree = Tree.of(list(choices))
    assert list(tree.choices) == sorted(choices, key=lambda c: (len(c), c))
    assert tree.nodes == len(choices) + 1
    for node, choice in enumerate(((), *tree.choices)):
        assert tree.depths[node] == len(choice)
        ancestors = {choice[:size] for size in range(len(choice) + 1)}
        for other, name in enumerate(((), *tree.choices)):
            assert bool(tree.mask[node, other]) == (name in ancestors)
        path = [int(at) for at in tree.paths[node] if at >= 0]
        assert [((), *tree.choices)[at] for at in path] == [choice[:size] for size in range(len(choice) + 1)]
        assert tree.paths[node, len(choice) + 1 :].tolist() == [-1] * (tree.depth - len(choice))
        if node:
            assert ((), *tree.choices)[int(tree.parents[node])] == choice[:-1]
            assert tree.ranks[node] == choice[-1]


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([(0, 0)], "without its parent"),
        ([(0,), (0,)], "twice"),
        ([(-1,)], "ranks of 0 or more"),
        ([()], "ranks of 0 or more"),
        ([(rank,) for rank in range(256)], "too many"),
    ],
)
def test_what_is_no_tree(choices: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Tree.of(choices)


def test_256_nodes_are_allowed() -> None:
    assert Tree.of([(rank,) for rank in range(255)]).nodes == 256


@pytest.mark.parametrize(("tree", "words"), [(chain(5), "deeper"), (Tree.of([(0,), (60,)]), "more guesses")])
def test_a_tree_that_asks_too_much(tree: Tree, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tree.check(4, 50)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["none", "chain", "default", "deep"])
def test_named_trees_fit_their_heads(name: str, num_heads: int) -> None:
    tree = named_tree(name, num_heads)
    tree.check(num_heads, 100)
    assert tree.nodes == {"none": 1, "chain": num_heads + 1}.get(name, tree.nodes)


def test_files(tmp_path: Path) -> None:
    choices = [(0,), (0, 0), (1,)]
    (tmp_path / "a.json").write_text(json.dumps([list(c) for c in choices]))
    (tmp_path / "b.json").write_text(json.dumps({"choices": [list(c) for c in choices]}))
    (tmp_path / "c.py").write_text(f"mc_sim = {choices}")
    for name in ("a.json", "b.json", "c.py"):
        assert set(load_tree(tmp_path / name).choices) == set(choices)
    (tmp_path / "bad").write_text("import os")
    with pytest.raises(InputError, match="not a tree"):
        load_tree(tmp_path / "bad")
    with pytest.raises(InputError, match="no such tree"):
        named_tree("bushy", 3)


@given(
    st.lists(
        st.lists(st.floats(0.0, 0.4), min_size=3, max_size=3).map(lambda r: sorted(r, reverse=True)),
        min_size=1,
        max_size=2,
    ),
    st.integers(1, 5),
)
def test_best_choices_is_optimal(rates: list[list[float]], nodes: int) -> None:
    """Against every prefix-closed set of that size."""
    everything = [c for depth in range(1, len(rates) + 1) for c in product(range(3), repeat=depth)]

    def gain(choices: list[tuple[int, ...]]) -> float:
        total = 0.0
        for choice in choices:
            chance = 1.0
            for head, rank in enumerate(choice):
                chance *= rates[head][rank]
            total += chance
        return total

    found = best_choices(rates, nodes)
    assert all(len(c) == 1 or c[:-1] in found for c in found)
    likeliest = sorted((gain([c]) for c in everything), reverse=True)[: nodes - 1]
    # A node is never likelier than its parent, so the likeliest nodes form a tree: an upper bound.
    assert gain(found) == pytest.approx(sum(likeliest))


def test_candidates() -> None:
    tree = Tree.of([(0,), (1,), (0, 2)])
    guesses = torch.arange(2 * 3 * 4).view(2, 3, 4)
    found = generate_candidates(torch.tensor([100, 200]), guesses, tree)
    assert found.tolist() == [[100, 0, 1, 6], [200, 12, 13, 18]]
