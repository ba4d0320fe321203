"""From the heads' guesses to the tokens of a draft tree."""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import Tree


def generate_candidates(roots: Tensor, guesses: Tensor, tree: Tree) -> Tensor:
    """Tokens of every node, int64 [B, nodes].

    roots: int64 [B], the base's own next tokens. guesses: int64 [B, heads, k], each head's best tokens,
    best first; heads >= the tree's depth, k >= its top_k.
    """
    if tree.nodes == 1:
        return roots.unsqueeze(1)
    drafted = guesses[:, tree.depths[1:] - 1, tree.ranks[1:]]
    return torch.cat([roots.unsqueeze(1), drafted], 1)
