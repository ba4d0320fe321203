"""Verification of a step: what the base's logits say about every request's drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import ops
from .posterior import Verdict, evaluate_posterior, evaluate_typical
from .request import Request
from .sampling import draw, probabilities, uniform
from .tree import Tree
from .work import ROOT_ONLY, Work


def judge(choosing: Sequence[Work], logits: Tensor) -> list[tuple[int, int, int]]:
    """(last accepted node, drafts accepted, next token) of each work, whose logits lie in a row."""
    if not choosing:
        return []
    base_tokens = ops.argmax(logits)
    verdicts: dict[int, tuple[int, int, int]] = {}
    groups: dict[Tree, list[tuple[int, Tensor, Tensor]]] = {}
    first = 0
    for index, work in enumerate(choosing):
        rows = slice(first, first + work.choices)
        first, params, tree = rows.stop, work.running.request.params, work.tree or ROOT_ONLY
        drafted, own = work.tokens[-work.choices :].to(logits.device), base_tokens[rows]
        if not params.greedy:
            chances = probabilities(logits[rows], params.temperature, params.top_k, params.top_p)
            own = draw(chances, _numbers(work.running.request, tree).to(logits.device))
            if params.acceptance == "typical":
                verdict = evaluate_typical(
                    drafted[None],
                    chances[None],
                    own[None],
                    tree,
                    params.typical_eps,
                    params.typical_alpha,
                )
                verdicts[index] = _as_ints(verdict)[0]
                continue
        groups.setdefault(tree, []).append((index, drafted, own))
    for tree, members in groups.items():
        drafted = torch.stack([tokens for _, tokens, _ in members])
        own = torch.stack([tokens for _, _, tokens in members])
        verdict = evaluate_posterior(drafted, own, tree)
        verdicts |= zip((index for index, _, _ in members), _as_ints(verdict), strict=True)
    return [verdicts[index] for index in range(len(choosing))]


def _numbers(request: Request, tree: Tree) -> Tensor:
    """A random number a node, fp64 [nodes]: that of the position after it."""
    position, seed = len(request.tokens), request.params.seed or 0
    return torch.tensor(
        [uniform(seed, position + depth) for depth in tree.depths.tolist()], dtype=torch.float64
    )


def _as_ints(verdict: Verdict) -> list[tuple[int, int, int]]:
    return list(zip(verdict.node.tolist(), verdict.length.tolist(), verdict.bonus.tolist(), strict=True))
