"""The choice of a tree from measurements, on machines and heads made up for the test."""

from __future__ import annotations

import random

import pytest

from medusa_quant.runtime.speculation import Speculation
from medusa_quant.runtime.tree import Tree, named_tree, smaller_parts


def _simulate(
    rates: list[float], fixed: float, per_row: float, batch: int = 1, steps: int = 600
) -> list[Tree]:
    """Trees chosen on a machine where a step takes fixed + per_row * rows, with these heads' chances of a
    right best guess (other ranks are never right)."""
    generator, policy, chosen = random.Random(1), Speculation.named("auto", "default", 4), []
    tree = policy.choose(batch)
    for _ in range(steps):
        chosen.append(tree)
        if tree.nodes > 1:
            for _ in range(batch):
                depth = 0
                while depth < 4 and generator.random() < rates[depth]:
                    depth += 1
                paths = [choice for choice in ((), *tree.choices) if choice == (0,) * len(choice)]
                accepted = max((path for path in paths if len(path) <= depth), key=len)
                policy.learn(tree, ((), *tree.choices).index(accepted))
        following = policy.choose(batch)
        if following is tree:
            noise = 1 + 0.1 * generator.random()
            policy.observe(tree, batch, (fixed + per_row * batch * tree.nodes) * noise)
        tree = following
    return chosen


def test_free_rows_give_the_tree_with_all_of_the_chain() -> None:
    late = _simulate([0.9, 0.9, 0.9, 0.9], 1.0, 0.0)[-300:]
    assert max(set(late), key=late.count).depth == 4


def test_dear_rows_or_bad_heads_give_plain_decoding() -> None:
    for chosen in (_simulate([0.4, 0.3, 0.2, 0.1], 0.0, 1.0), _simulate([0.0] * 4, 1.0, 0.05)):
        plain = [tree.nodes == 1 for tree in chosen[-300:]]
        assert sum(plain) > 0.9 * len(plain)


def test_it_settles_within_few_steps_and_skips_hopeless_trees() -> None:
    chosen = _simulate([0.4, 0.3, 0.2, 0.1], 1.0, 2.0, steps=100)
    assert all(tree.nodes < 6 for tree in chosen)
    assert all(tree.nodes == 1 for tree in chosen[-50:])


def test_a_chance_is_learned_from_every_tree_that_holds_the_node() -> None:
    policy = Speculation.named("auto", "default", 4)
    small, large = policy.trees[1], policy.trees[-1]
    before = policy.expected_tokens(large)
    for _ in range(50):
        policy.learn(small, 0)
    assert policy.expected_tokens(large) < before - 0.3


@pytest.mark.parametrize("name", ["default", "deep", "chain", "none"])
def test_parts_of_a_tree_are_trees_of_growing_size(name: str) -> None:
    tree = named_tree(name, 4)
    parts = [Tree.of(choices) for choices in smaller_parts(tree)]
    assert [part.nodes for part in parts] == sorted({part.nodes for part in parts})
    assert all(set(part.choices) < set(tree.choices) for part in parts)
    assert [t.nodes for t in Speculation("auto", tree, 4).trees][:1] == [1]


def test_parts_hold_what_was_learned_and_stay_trees() -> None:
    tree = named_tree("default", 4)
    # A child that was counted likelier than its parent still comes after it.
    chances = {(0,): 0.3, (1,): 0.2, (0, 0): 0.9}
    parts = [set(Tree.of(part).choices) for part in smaller_parts(tree, lambda c: chances.get(c, 0.0))]
    assert parts[:3] == [{(0,)}, {(0,), (0, 0)}, {(0,), (0, 0), (1,)}]
    chances[0, 0] = 0.1
    parts = [set(Tree.of(part).choices) for part in smaller_parts(tree, lambda c: chances.get(c, 0.0))]
    assert parts[1] == {(0,), (1,)}


def test_siblings_that_are_right_more_often_than_the_chain_are_drafted() -> None:
    policy = Speculation.named("auto", "default", 4)
    for _ in range(200):
        largest = policy.trees[-1]
        policy.learn(largest, ((), *largest.choices).index((1,)))
        policy.choose(1)
    three = next(tree for tree in policy.trees if tree.nodes == 3)
    assert (1,) in three.choices
