"""Which tree the next step drafts: fixed, or the one that yields most tokens a second at this batch size."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from .tree import Choice, Tree, chain, named_tree, prior_chance, smaller_parts

MODES = ("auto", "tree", "chain", "off")
_PRIOR_WEIGHT = 8.0  # drafts the prior chance of a node counts for
_WARM_UP = 2  # times a step is timed before it is believed; the first one warms caches
_RETRY = 64  # steps after which the others are timed again: contexts grow and machines change
_REGROW = 32  # steps after which the parts of the tree are chosen anew, from what was learned
_NEW_SHARE = 0.2
_FASTER_AT_MOST = 0.85  # a larger tree's step against a smaller one's, as kernels take rows in blocks


@dataclass
class _Timing:
    seconds: float = 0.0
    tries: int = 0
    last: int = 0


@dataclass
class _Hits:
    """How often a node was on the accepted path, of the drafts that held it."""

    hits: float
    drafts: float = _PRIOR_WEIGHT


class Speculation:
    """Chooses a tree by batch size from what was accepted and how long steps took.

    mode: `off`, `chain` and `tree` always draft the same; `auto` weighs the tree, its most promising parts,
    the chain and no draft against each other. A node's chance is learned from every draft that holds it,
    whichever tree it was part of, and parts are grown anew from what was learned; a step's time is measured
    for each number of nodes and of heads, and each batch size.
    """

    def __init__(self, mode: str, tree: Tree, num_heads: int) -> None:
        if mode not in MODES:
            raise InputError("unknown speculation mode", expected=" | ".join(MODES), found=mode)
        self._hits: dict[Choice, _Hits] = {}
        self._timings: dict[tuple[int, int, int], _Timing] = {}
        self._step = 0
        self._grown: dict[tuple[Choice, ...], Tree] = {}
        self._auto = False
        none = Tree.of([])
        if num_heads == 0 or mode == "off" or (tree.nodes == 1 and mode != "chain"):
            self._fixed = [none]
        elif mode == "auto":
            self._auto, self._fixed, self._whole = True, [none, chain(num_heads), tree], tree
        else:
            self._fixed = [tree if mode == "tree" else chain(num_heads)]
        self._trees = self._candidates()

    @classmethod
    def named(cls, mode: str, tree: str, num_heads: int) -> Speculation:
        return cls(mode, named_tree(tree, num_heads), num_heads)

    @property
    def trees(self) -> list[Tree]:
        """What it chooses among now, by size; those to come are parts of the largest."""
        return self._trees

    def choose(self, batch: int) -> Tree:
        """The tree of the next step for this many requests."""
        if not self._auto:
            return self._trees[0]
        self._step += 1
        if self._step % _REGROW == 0:
            self._trees = self._candidates()
        yields = [self.expected_tokens(tree) for tree in self._trees]
        timings = [self._timing(tree, batch) for tree in self._trees]
        best, best_rate, fastest = 0, 0.0, 0.0
        for index, (tokens, timing) in enumerate(zip(yields, timings, strict=True)):
            if timing.tries < _WARM_UP:
                # Worth timing only if it could win at the speed of the smaller ones.
                if not best_rate or tokens / fastest > best_rate:
                    return self._trees[index]
                continue
            fastest = max(fastest, timing.seconds * _FASTER_AT_MOST)
            if tokens / timing.seconds > best_rate:
                best, best_rate = index, tokens / timing.seconds
        timed = [index for index, timing in enumerate(timings) if timing.tries]
        stale = min(timed, key=lambda index: timings[index].last)
        due = self._step - timings[stale].last > _RETRY * len(timed)
        # A tree that was far behind is not worth another look.
        hopeful = yields[stale] / timings[stale].seconds > 0.7 * best_rate
        return self._trees[stale if due and hopeful else best]

    def expected_tokens(self, tree: Tree) -> float:
        """Tokens a draft of this tree yields, the base's own included: 1 + sum of its nodes' chances."""
        return 1.0 + sum(map(self._chance, tree.choices))

    def learn(self, tree: Tree, node: int) -> None:
        """A request's draft was accepted up to this node."""
        if not self._auto:
            return
        accepted = ((), *tree.choices)[node]
        for choice in tree.choices:
            seen = self._node(choice)
            seen.drafts += 1
            seen.hits += accepted[: len(choice)] == choice

    def observe(self, tree: Tree, batch: int, seconds: float) -> None:
        """A step of this many requests that only decoded took so long, from one draft to the next."""
        if not self._auto:
            return
        timing = self._timing(tree, batch)
        believed = timing.tries > 1
        timing.seconds += (_NEW_SHARE if believed else 1.0) * (seconds - timing.seconds)
        timing.tries, timing.last = timing.tries + 1, self._step

    def _candidates(self) -> list[Tree]:
        if not self._auto:
            return self._fixed
        found = {tree.choices: tree for tree in self._fixed}
        for part in smaller_parts(self._whole, self._chance):
            choices = tuple(sorted(part, key=lambda choice: (len(choice), choice)))
            # The same part is the same object: the batch tells trees apart by identity.
            found[choices] = self._grown.setdefault(choices, Tree.of(choices))
        return sorted(found.values(), key=lambda tree: tree.nodes)

    def _chance(self, choice: Choice) -> float:
        node = self._node(choice)
        return node.hits / node.drafts

    def _timing(self, tree: Tree, batch: int) -> _Timing:
        # Batch sizes in powers of two: neighbours cost alike.
        return self._timings.setdefault((tree.nodes, tree.depth, (batch - 1).bit_length()), _Timing())

    def _node(self, choice: Choice) -> _Hits:
        return self._hits.setdefault(choice, _Hits(_PRIOR_WEIGHT * prior_chance(choice)))
