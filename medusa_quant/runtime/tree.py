"""Draft trees: which combinations of the heads' guesses one verification step looks at."""

from __future__ import annotations

import ast
import heapq
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

Choice = tuple[int, ...]
MAX_NODES = 256

# How often a head's r-th best guess is the base's token: shares of head 0, scaled for later heads, as
# heads trained by self-distillation show them. They only shape the default trees.
_RANK_RATES = (0.38, 0.10, 0.055, 0.035, 0.025, 0.019, 0.015, 0.012, 0.010, 0.009)
_HEAD_DECAY = 0.72
_NODES = {"default": 12, "deep": 40}


@dataclass(frozen=True, eq=False)
class Tree:
    """A prefix-closed tree of n nodes; node 0 is the root, the base's own next token.

    choices: one tuple a node beside the root: (r0, r1, ...) takes head 0's r0-th best, then head 1's r1-th
    best; sorted by (length, lexicographic), so that a node's parent comes before it.
    parents, depths, ranks: int64 [n] (root: -1, 0, 0). mask: bool [n, n], ancestors and self.
    paths: int64 [n, max depth + 1], each node's way from the root, padded with -1.
    """

    choices: tuple[Choice, ...]
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    mask: Tensor
    paths: Tensor

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> Tree:
        """Build from choices in any order. Raises InputError unless they form a tree of at most 256 nodes."""
        given = [tuple(int(rank) for rank in choice) for choice in choices]
        ordered = tuple(sorted(set(given), key=lambda choice: (len(choice), choice)))
        if len(ordered) != len(given):
            raise InputError("a tree names a node twice", found=_first_repeated(given))
        if len(ordered) + 1 > MAX_NODES:
            raise InputError("too many tree nodes", expected=f"at most {MAX_NODES}", found=len(ordered) + 1)
        number: dict[Choice, int] = {(): 0}
        for index, choice in enumerate(ordered, 1):
            if not choice or min(choice) < 0:
                raise InputError("a tree node needs ranks of 0 or more", found=choice)
            if choice[:-1] not in number:
                raise InputError(f"the tree has {choice} without its parent {choice[:-1]}")
            number[choice] = index
        parents = torch.tensor([-1] + [number[choice[:-1]] for choice in ordered])
        depths = torch.tensor([0] + [len(choice) for choice in ordered])
        ranks = torch.tensor([0] + [choice[-1] for choice in ordered])
        nodes, deepest = len(parents), int(depths.max())
        mask = torch.eye(nodes, dtype=torch.bool)
        paths = torch.full((nodes, deepest + 1), -1)
        paths[0, 0] = 0
        for node in range(1, nodes):
            parent, depth = int(parents[node]), int(depths[node])
            mask[node] |= mask[parent]
            paths[node, :depth] = paths[parent, :depth]
            paths[node, depth] = node
        return cls(ordered, parents, depths, ranks, mask, paths)

    def to(self, device: torch.device) -> Tree:
        """The same tree with its tensors on a device."""
        names = ("parents", "depths", "ranks", "mask", "paths")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Heads it uses."""
        return int(self.depths.max())

    @property
    def top_k(self) -> int:
        """Guesses of a head it needs."""
        return int(self.ranks.max()) + 1

    def check(self, num_heads: int, vocab_size: int) -> None:
        """Raise InputError where it asks for more heads, or more guesses, than there are."""
        if self.depth > num_heads:
            deepest = self.choices[-1]
            raise InputError(
                "the tree is deeper than there are heads", expected=f"{num_heads} levels", found=deepest
            )
        if self.top_k > vocab_size:
            raise InputError(
                "the tree asks for more guesses than tokens", expected=vocab_size, found=self.top_k
            )


def chain(depth: int) -> Tree:
    """Each head's best guess only."""
    return Tree.of([(0,) * level for level in range(1, depth + 1)])


def best_choices(rates: Sequence[Sequence[float]], nodes: int) -> list[Choice]:
    """The tree of `nodes` nodes (root included) with the largest expected acceptance.

    rates: rates[head][rank], how often a head's rank-th guess is right. A node's chance is the product
    along its path; taking the likeliest node whose parent is in the tree is optimal, as a child is never
    likelier than its parent.
    """
    chosen: list[Choice] = []
    heap: list[tuple[float, Choice]] = [(-rates[0][0], (0,))] if rates else []
    while heap and len(chosen) + 1 < nodes:
        negative, choice = heapq.heappop(heap)
        chosen.append(choice)
        head, rank = len(choice) - 1, choice[-1]
        if rank + 1 < len(rates[head]) and rates[head][rank] > 0:
            sibling = negative / rates[head][rank] * rates[head][rank + 1]
            heapq.heappush(heap, (sibling, (*choice[:-1], rank + 1)))
        if head + 1 < len(rates):
            heapq.heappush(heap, (negative * rates[head + 1][0], (*choice, 0)))
    return chosen


def prior_chance(choice: Choice) -> float:
    """How likely a node is accepted, before anything is known about the heads."""
    chance = 1.0
    for head, rank in enumerate(choice):
        chance *= _rate(head, rank)
    return chance


def _rate(head: int, rank: int) -> float:
    return _RANK_RATES[min(rank, len(_RANK_RATES) - 1)] * _HEAD_DECAY**head


def smaller_parts(tree: Tree, chance: Callable[[Choice], float] = prior_chance) -> list[tuple[Choice, ...]]:
    """Choices of the most promising parts of a tree: 2, 3, 4, 6, 8, 12, ... nodes, below its own size."""
    # A node is never likelier than its parent, whatever was counted for each; choices are sorted by length.
    capped: dict[Choice, float] = {(): 1.0}
    for choice in tree.choices:
        capped[choice] = min(chance(choice), capped[choice[:-1]])
    # Python's sort keeps equals in order: parents stay first.
    ordered = sorted(tree.choices, key=capped.__getitem__, reverse=True)
    sizes = [size for power in range(1, 8) for size in (2**power, 3 * 2 ** (power - 1))]
    return [tuple(ordered[: size - 1]) for size in sizes if size < tree.nodes]


def named_tree(name: str, num_heads: int) -> Tree:
    """`none` (the root alone), `chain`, `default`, `deep`, or a file holding choices.

    A file is JSON, or the reference code's Python list of tuples. Raises InputError for anything else.
    """
    if name == "none" or num_heads == 0:
        return Tree.of([])
    if name == "chain":
        return chain(num_heads)
    if name in _NODES:
        ranks = range(len(_RANK_RATES))
        rates = [[_rate(head, rank) for rank in ranks] for head in range(num_heads)]
        return Tree.of(best_choices(rates, _NODES[name]))
    return load_tree(name)


def load_tree(file: str | Path) -> Tree:
    """A tree from a file; see `named_tree`."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise InputError("no such tree", expected="none | chain | default | deep | a file", found=file)
    text = path.read_text(encoding="utf-8")
    try:
        try:
            content = json.loads(text)
        except ValueError:
            content = ast.literal_eval(text.partition("=")[2] or text)
        choices = content["choices"] if isinstance(content, dict) else content
        return Tree.of([tuple(choice) for choice in choices])
    except InputError as error:
        raise InputError(str(error), file=path) from error
    except (ValueError, SyntaxError, TypeError, KeyError) as error:
        raise InputError("not a tree", file=path, expected="a list of lists of ranks") from error


def save_tree(file: Path, choices: Sequence[Choice], about: dict[str, Any]) -> None:
    """Write a tree for `load_tree`, with notes on where it came from; the file is replaced in one step."""
    content = {"choices": [list(choice) for choice in choices], **about}
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror}", file=file) from error
    finally:
        temporary.unlink(missing_ok=True)


def _first_repeated(choices: Sequence[Choice]) -> Choice:
    seen: set[Choice] = set()
    return next(choice for choice in choices if choice in seen or seen.add(choice))  # type: ignore[func-returns-value]
