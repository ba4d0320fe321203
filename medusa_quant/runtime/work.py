"""What each request adds to a step of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import Request
from .tree import Tree

ROOT_ONLY = Tree.of([])


@dataclass
class Running:
    """A request in a slot. cached: tokens whose keys and values are stored. guesses: [heads, k] or None."""

    request: Request
    slot: int
    cached: int = 0
    guesses: Tensor | None = None


@dataclass
class Work:
    """What one request adds to a step: tokens [n], whether it drafts a tree, or ends its prompt."""

    running: Running
    tokens: Tensor
    tree: Tree | None  # None: part of a prompt
    last: bool  # the tokens reach the end of what is known, so that the next can be chosen

    @property
    def choices(self) -> int:
        """Nodes whose logits are looked at: all of a tree, or a prompt's last token."""
        return 1 if self.tree is None else self.tree.nodes


def rows_to_choose_from(works: Sequence[Work]) -> tuple[list[Work], list[Tensor]]:
    """The works that get a next token in this step, and the rows of its hidden states that tell."""
    choosing, rows, first = [], [], 0
    for work in works:
        end = first + len(work.tokens)
        if work.last:
            choosing.append(work)
            rows.append(torch.arange(end - work.choices, end))
        first = end
    return choosing, rows
