"""Verification: how far a draft tree agrees with the base. Pure functions over a batch of trees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .tree import Tree

TYPICAL_EPS, TYPICAL_ALPHA = 0.09, 0.3


class Verdict(NamedTuple):
    """node: int64 [B], the last accepted node (0: none but the root). length: int64 [B], drafts accepted.
    bonus: int64 [B], the base's token after it."""

    node: Tensor
    length: Tensor
    bonus: Tensor


def evaluate_posterior(tokens: Tensor, base_tokens: Tensor, tree: Tree) -> Verdict:
    """The longest path on which every drafted token is the base's token at its parent; ties to the first.

    tokens: int64 [B, nodes], the drafts. base_tokens: int64 [B, nodes], the base's token after each node:
    its argmax (greedy), or a draw from its distribution (sampling). A draw that no child matches ends the
    path, and is itself the next token: whatever the drafts, tokens come from the base's distribution.
    """
    passed = tokens[:, 1:] == base_tokens[:, tree.parents[1:]]
    return _deepest(passed, base_tokens, tree)


def evaluate_typical(
    tokens: Tensor,
    probabilities: Tensor,
    base_tokens: Tensor,
    tree: Tree,
    eps: float = TYPICAL_EPS,
    alpha: float = TYPICAL_ALPHA,
) -> Verdict:
    """Typical acceptance (Cai et al. 2024): a draft passes where p > min(eps, alpha * exp(-entropy)).

    Not exact: the text no longer follows the base's distribution. probabilities: fp32 [B, nodes, V] after
    each node. base_tokens: draws, of which the one at the last accepted node becomes the next token.
    """
    entropy = torch.special.entr(probabilities).sum(-1)
    limit = (alpha * torch.exp(-entropy)).clamp(max=eps)
    parents = tree.parents[1:]
    chances = probabilities[:, parents].gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
    return _deepest(chances > limit[:, parents], base_tokens, tree)


def _deepest(passed: Tensor, base_tokens: Tensor, tree: Tree) -> Verdict:
    """The deepest node all of whose ancestors passed too. passed: bool [B, nodes - 1], all but the root."""
    failed = torch.nn.functional.pad(~passed, (1, 0))
    good = ~(failed.unsqueeze(1) & tree.mask.to(passed.device)).any(2)
    depths = torch.where(good, tree.depths.to(good.device), -1)
    # argmax takes the first of equal depths, and nodes are in the order of paths.
    node = depths.argmax(1, keepdim=True)
    return Verdict(node.squeeze(1), depths.gather(1, node).squeeze(1), base_tokens.gather(1, node).squeeze(1))
