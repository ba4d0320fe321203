"""Which tree the next step drafts: fixed, or the one that yields most tokens a second at this batch size."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from .tree import Tree, chain, named_tree

MODES = ("auto", "tree", "chain", "off")
_WARM_UP = 3  # times a tree is tried before its measurements are believed
_RETRY = 64  # steps after which the others are tried again: batches and machines change
_MEMORY = 0.9


@dataclass
class _Record:
    tokens: float = 0.0
    seconds: float = 0.0
    tries: int = 0
    last: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("inf")


class Speculation:
    """Chooses a tree by batch size from measured steps.

    mode: `off`, `chain` and `tree` always draft the same; `auto` compares them with each other, and with
    shorter chains, by tokens per second, since a step's cost grows with its nodes and the batch.
    """

    def __init__(self, mode: str, tree: Tree, num_heads: int) -> None:
        if mode not in MODES:
            raise InputError("unknown speculation mode", expected=" | ".join(MODES), found=mode)
        none = Tree.of([])
        if num_heads == 0 or mode == "off":
            self._trees = [none]
        elif mode == "auto":
            self._trees = [none, *(chain(depth) for depth in range(1, num_heads + 1)), tree]
        else:
            self._trees = [tree if mode == "tree" else chain(num_heads)]
        self._records: dict[tuple[int, int], _Record] = {}
        self._step = 0

    @classmethod
    def named(cls, mode: str, tree: str, num_heads: int) -> Speculation:
        return cls(mode, named_tree(tree, num_heads), num_heads)

    @property
    def trees(self) -> list[Tree]:
        """Every tree it may choose."""
        return self._trees

    def choose(self, batch: int) -> Tree:
        """The tree of the next step for this many requests."""
        if len(self._trees) == 1:
            return self._trees[0]
        self._step += 1
        records = [self._record(index, batch) for index in range(len(self._trees))]
        for index, record in enumerate(records):
            if record.tries < _WARM_UP:
                return self._trees[index]
        best = max(range(len(records)), key=lambda index: records[index].rate)
        stale = min(range(len(records)), key=lambda index: records[index].last)
        # A tree that was far behind is not worth another look.
        due = self._step - records[stale].last > _RETRY * len(records)
        hopeful = records[stale].rate > 0.7 * records[best].rate
        return self._trees[stale if due and hopeful else best]

    def observe(self, tree: Tree, batch: int, tokens: int, seconds: float) -> None:
        """Learn from a step that only decoded: its tokens for all requests, and its wall time."""
        if len(self._trees) == 1:
            return
        record = self._record(self._trees.index(tree), batch)
        record.tokens = _MEMORY * record.tokens + tokens
        record.seconds = _MEMORY * record.seconds + seconds
        record.tries, record.last = record.tries + 1, self._step

    def _record(self, index: int, batch: int) -> _Record:
        # Batch sizes in powers of two: neighbours cost alike.
        return self._records.setdefault((index, (batch - 1).bit_length()), _Record())
