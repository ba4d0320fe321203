"""Heads judged on held-out states: against the base's own tokens, and against the heads they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints import MedusaHeads
from ..errors import InputError
from .acceptance import Tree, accepted_lengths, token_ranks
from .forward import Matrix, head_states, linear
from .statistics import Statistics

TOP_K = (1, 5, 10)
# States whose logits over the whole vocabulary are held at once.
_STATES = 512

# (heads done, heads in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class HeadScore:
    """One head on the held-out states.

    accuracy: {k: share of states whose token t+2+head is among the head's k best}.
    source_accuracy, agreement, kl, output_error: beside the source head; None without one. agreement:
    {k: mean share of the source's k best that are among the k best}; for k = 1, equal argmax. kl: mean
    KL(source || head) in nats. output_error: ||logits - source logits||_F / ||source logits||_F.
    """

    head: int
    accuracy: dict[int, float]
    source_accuracy: dict[int, float] | None = None
    agreement: dict[int, float] | None = None
    kl: float | None = None
    output_error: float | None = None


@dataclass(frozen=True)
class Report:
    """heads: one score each. acceptance: predicted mean tokens per step with `tree`, the base's own token
    included; source_acceptance: the source heads', where compared. states: held-out states judged on.
    ranks, source_ranks: int64 [states, heads], the place of the base's token in each head's logits."""

    heads: list[HeadScore]
    acceptance: float
    source_acceptance: float | None
    states: int
    tree_nodes: int
    ranks: Tensor = field(repr=False)
    source_ranks: Tensor = field(repr=False)

    @property
    def acceptance_ratio(self) -> float | None:
        return None if self.source_acceptance is None else self.acceptance / self.source_acceptance

    @property
    def min_agreement(self) -> float | None:
        """The lowest top-1 agreement of any head."""
        found = [score.agreement[1] for score in self.heads if score.agreement is not None]
        return min(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "heads": [asdict(score) for score in self.heads],
            "acceptance_length": self.acceptance,
            "source_acceptance_length": self.source_acceptance,
            "acceptance_ratio": self.acceptance_ratio,
            "min_agreement": self.min_agreement,
            "held_out_states": self.states,
            "tree_nodes": self.tree_nodes,
        }


@dataclass(frozen=True)
class HeldOut:
    """states fp32 [P, H]; tokens int64 [P, heads]: the base's token t+2+i after each state."""

    states: Tensor
    tokens: Tensor


def held_out(statistics: Statistics, num_heads: int, limit: int | None = None) -> HeldOut:
    """The held-out states whose tokens are known for every head (the first `limit`, spread evenly).

    Raises InputError where there are none, or the statistics look too few tokens ahead.
    """
    ahead = statistics.held_next.shape[1] - 1
    if num_heads > ahead:
        raise InputError("the statistics look fewer tokens ahead", expected=num_heads, found=ahead)
    known = (statistics.held_next[:, : num_heads + 1] >= 0).all(1).nonzero().squeeze(1)
    if not known.numel():
        raise InputError(
            "no held-out states to judge heads by",
            expected=f"continuations of more than {num_heads} tokens of at least 2 prompts",
            fix="run `medusa-quant calibrate` on more prompts",
        )
    if limit is not None and known.numel() > limit:
        known = known[torch.linspace(0, known.numel() - 1, limit).long()]
    tokens = statistics.held_next[known, 1 : num_heads + 1].long()
    return HeldOut(statistics.held_states[known].float(), tokens)


@torch.inference_mode()
def evaluate(
    heads: MedusaHeads,
    data: HeldOut,
    tree: Tree,
    source: MedusaHeads | None = None,
    shared_lm_head: Matrix | None = None,
    progress: Progress | None = None,
) -> Report:
    """Score heads on held-out states, beside the source heads where given.

    shared_lm_head: the base's LM matrix [V, H], for heads without their own.
    Raises InputError if heads and source, or an LM matrix, do not fit.
    """
    if source is not None:
        _check_comparable(heads, source)
    token_map = _token_map(heads)
    scores, ranks, source_ranks = [], [], []
    for head in range(heads.num_heads):
        if progress is not None:
            progress(head, heads.num_heads)
        tokens, known = _local_tokens(data.tokens[:, head], token_map)
        totals = _Totals(known)
        lm_head = _lm_matrix(heads, head, shared_lm_head)
        states = head_states(heads, head, data.states)
        _check_vocab(lm_head, tokens)
        if source is not None:
            source_lm = _lm_matrix(source, head, shared_lm_head)
            source_states = head_states(source, head, data.states)
        for start in range(0, states.shape[0], _STATES):
            rows = slice(start, start + _STATES)
            logits = linear(states[rows], lm_head)
            wanted = linear(source_states[rows], source_lm) if source is not None else None
            totals.add(logits, wanted, tokens[rows], known[rows])
        scores.append(totals.score(head))
        ranks.append(torch.cat(totals.ranks))
        source_ranks.append(torch.cat(totals.source_ranks) if source is not None else ranks[-1])
    own, other = torch.stack(ranks, 1), torch.stack(source_ranks, 1)
    return Report(
        scores,
        float(accepted_lengths(own, tree).double().mean()),
        None if source is None else float(accepted_lengths(other, tree).double().mean()),
        data.states.shape[0],
        len(tree),
        own,
        other,
    )


class _Totals:
    """Sums over blocks of states of one head."""

    def __init__(self, known: Tensor) -> None:
        self.count = known.numel()
        self.ranks: list[Tensor] = []
        self.source_ranks: list[Tensor] = []
        self.overlap = dict.fromkeys(TOP_K, 0.0)
        self.kl = self.difference = self.norm = 0.0
        self.compared = False

    def add(self, logits: Tensor, wanted: Tensor | None, tokens: Tensor, known: Tensor) -> None:
        unknown = torch.iinfo(torch.int64).max
        self.ranks.append(token_ranks(logits, tokens).masked_fill(~known, unknown))
        if wanted is None:
            return
        self.compared = True
        self.source_ranks.append(token_ranks(wanted, tokens).masked_fill(~known, unknown))
        depth = min(max(TOP_K), logits.shape[1])
        best, source_best = logits.topk(depth, 1).indices, wanted.topk(depth, 1).indices
        for k in TOP_K:
            same = best[:, :k, None] == source_best[:, None, :k]
            self.overlap[k] += float(same.any(1).float().mean(1).sum())
        log_p = F.log_softmax(wanted, 1)
        self.kl += float((log_p.exp() * (log_p - F.log_softmax(logits, 1))).sum(dtype=torch.float64))
        self.difference += float((logits - wanted).square().sum(dtype=torch.float64))
        self.norm += float(wanted.square().sum(dtype=torch.float64))

    def score(self, head: int) -> HeadScore:
        accuracy = self._accuracy(self.ranks)
        if not self.compared:
            return HeadScore(head, accuracy)
        return HeadScore(
            head,
            accuracy,
            self._accuracy(self.source_ranks),
            {k: total / self.count for k, total in self.overlap.items()},
            max(0.0, self.kl / self.count),
            (self.difference / self.norm) ** 0.5 if self.norm else float(self.difference > 0),
        )

    def _accuracy(self, ranks: list[Tensor]) -> dict[int, float]:
        merged = torch.cat(ranks)
        return {k: float((merged < k).double().mean()) for k in TOP_K}


def _lm_matrix(heads: MedusaHeads, head: int, shared: Matrix | None) -> Matrix:
    lm_head = heads.lm_head(head)
    if lm_head is not None:
        return lm_head.load()
    if shared is None:
        raise InputError("these heads share the base's LM matrix", file=heads.path, fix="pass --base MODEL")
    features = shared.shape[1] if isinstance(shared, Tensor) else shared.in_features
    if features != heads.hidden_size:
        raise InputError(
            "the base does not fit these heads: hidden size differs",
            file=heads.path,
            expected=f"H {heads.hidden_size}",
            found=f"H {features}",
        )
    return shared


def _check_vocab(lm_head: Matrix, tokens: Tensor) -> None:
    outputs = lm_head.shape[0] if isinstance(lm_head, Tensor) else lm_head.out_features
    if int(tokens.max()) >= outputs:
        raise InputError(
            "the held-out tokens are not of these heads' vocabulary",
            expected=f"V {outputs}",
            found=f"token {int(tokens.max())}",
            fix="calibrate on the base these heads were trained for",
        )


def _check_comparable(heads: MedusaHeads, source: MedusaHeads) -> None:
    for name in ("num_heads", "num_layers", "hidden_size"):
        if getattr(heads, name) != getattr(source, name):
            raise InputError(
                f"not the source of these heads: {name} differs",
                file=source.path,
                expected=getattr(heads, name),
                found=getattr(source, name),
            )
    own, other = heads.lm_head(0), source.lm_head(0)
    if own is not None and other is not None and own.shape != other.shape:
        raise InputError(
            "not the source of these heads: vocabulary size differs",
            file=source.path,
            expected=own.shape[0],
            found=other.shape[0],
        )


def _token_map(heads: MedusaHeads) -> Tensor | None:
    tensor = heads.token_map()
    return None if tensor is None else tensor.dense().long()


def _local_tokens(tokens: Tensor, token_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """LM rows of full-vocabulary tokens, and which have one: others can never be drafted."""
    if token_map is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    size = int(max(int(token_map.max()), int(tokens.max()))) + 1
    row_of = torch.full((size,), -1)
    row_of[token_map] = torch.arange(token_map.numel())
    rows = row_of[tokens]
    return rows.clamp(min=0), rows >= 0
