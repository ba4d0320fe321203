"""The training loop: shuffled rows, one optimizer, checkpoints, and accuracy on held-out texts."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .corpus import Corpus
from .heads import TrainableHeads

_EVALUATED_ROWS = 16384
_STEPS_BETWEEN_SAVES = 100

# (step, steps, loss of the step)
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class TrainOptions:
    """loss: `ce` on the token that followed, `kl` to the base's distribution over its ten best tokens, or
    `teacher`: KL to what a teacher's same head says of the whole restricted vocabulary.
    dtype: of the matrix products, fp32 or bf16; parameters and optimizer are fp32."""

    epochs: int = 3
    batch_size: int = 1024
    learning_rate: float = 1e-3
    loss: str = "ce"
    dtype: str = "fp32"
    seed: int = 0


@dataclass(frozen=True)
class Accuracy:
    """top1, top5: per head, share of held-out rows whose token is the best, or among the five best, of the
    restricted vocabulary; a token outside of it is a miss."""

    top1: list[float]
    top5: list[float]
    rows: int


def train(
    heads: TrainableHeads,
    corpus: Corpus,
    vocabulary: Tensor,
    options: TrainOptions,
    checkpoint: Path,
    progress: Progress | None = None,
    teacher: TrainableHeads | None = None,
) -> None:
    """Train in place. vocabulary: int64 [R], ids of the LM rows, ascending.

    teacher: heads of the same shape, for loss `teacher`.
    checkpoint: where an unfinished run is kept; one of the same run is continued, to the same result.
    """
    rows = corpus.usable(heads.num_heads, held=False)
    per_epoch = math.ceil(rows.numel() / options.batch_size)
    steps = per_epoch * options.epochs
    optimizer = torch.optim.AdamW(heads.parameters(), lr=options.learning_rate, weight_decay=0.0)
    identity = hashlib.sha256(
        json.dumps([asdict(options), rows.numel(), vocabulary.numel(), repr(heads.scheme)]).encode()
    ).hexdigest()
    first = _resume(checkpoint, identity, heads, optimizer)
    local = _local_ids(corpus, vocabulary)
    for step in range(first, steps):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(
            rows.numel(), generator=torch.Generator().manual_seed(options.seed * 1009 + epoch)
        )
        numbers = rows[order[place * options.batch_size : (place + 1) * options.batch_size]].sort().values
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, steps)
        optimizer.zero_grad(set_to_none=True)
        loss = _step(heads, corpus, local, numbers, options, teacher)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps, loss)
        if (step + 1) % _STEPS_BETWEEN_SAVES == 0:
            _save(checkpoint, identity, heads, optimizer, step + 1)


def _step(
    heads: TrainableHeads,
    corpus: Corpus,
    local: Tensor,
    numbers: Tensor,
    options: TrainOptions,
    teacher: TrainableHeads | None,
) -> float:
    states, total = corpus.rows(numbers), 0.0
    for head in range(heads.num_heads):
        place, known = corpus.targets(numbers, head)
        with _precision(options.dtype):
            logits = heads(states[known], head).float()
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(states[known], head).float()
        if teacher is None:
            loss = _loss(logits, corpus, local, place[known], options.loss)
        else:
            log_chances = F.log_softmax(logits, 1), F.log_softmax(wanted, 1)
            loss = F.kl_div(*log_chances, reduction="batchmean", log_target=True)
        # One head at a time: the logits of all would be the largest tensor by far.
        loss.backward()
        total += float(loss.detach())
    return total / heads.num_heads


def _loss(logits: Tensor, corpus: Corpus, local: Tensor, place: Tensor, kind: str) -> Tensor:
    if kind == "ce":
        return F.cross_entropy(logits, local[corpus.chosen[place].long()], ignore_index=-1)
    ids = local[corpus.top_ids[place].long()]
    wanted = corpus.top_logits[place].float().masked_fill(ids < 0, float("-inf"))
    chances = torch.softmax(wanted, 1).nan_to_num(0.0)
    found = F.log_softmax(logits, 1).gather(1, ids.clamp(min=0))
    return -(chances * found).sum(1).mean()


@torch.no_grad()
def accuracy(heads: TrainableHeads, corpus: Corpus, vocabulary: Tensor, dtype: str) -> Accuracy:
    """Of every head, on rows of held-out texts (at most 16,384, spread evenly)."""
    rows = corpus.usable(heads.num_heads, held=True)
    if rows.numel() > _EVALUATED_ROWS:
        rows = rows[torch.linspace(0, rows.numel() - 1, _EVALUATED_ROWS).long()]
    local = _local_ids(corpus, vocabulary)
    hits = torch.zeros(heads.num_heads, 2)
    counts = torch.zeros(heads.num_heads)
    for numbers in rows.split(1024):
        states = corpus.rows(numbers)
        for head in range(heads.num_heads):
            place, known = corpus.targets(numbers, head)
            with _precision(dtype):
                best = heads(states[known], head).float().topk(5, 1).indices
            right = best == local[corpus.chosen[place[known]].long()].unsqueeze(1)
            hits[head] += torch.stack([right[:, 0].sum(), right.any(1).sum()])
            counts[head] += known.sum()
    shares = (hits / counts.clamp(min=1).unsqueeze(1)).t().tolist()
    return Accuracy(shares[0], shares[1], rows.numel())


def seen_vocabulary(corpus: Corpus) -> Tensor:
    """int64 [R]: ids the training texts hold, ascending."""
    return corpus.chosen[~corpus.held].unique().long()


def _local_ids(corpus: Corpus, vocabulary: Tensor) -> Tensor:
    """int64 [V]: the LM row of a token id, -1 where it has none."""
    size = int(max(int(corpus.chosen.max()), int(corpus.top_ids.max()), int(vocabulary.max()))) + 1
    local = torch.full((size,), -1)
    local[vocabulary] = torch.arange(vocabulary.numel())
    return local


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 3 %, then half a cosine to zero."""
    warm = max(1, int(0.03 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _precision(dtype: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()


def _save(
    path: Path, identity: str, heads: TrainableHeads, optimizer: torch.optim.Optimizer, step: int
) -> None:
    temporary = path.with_name(path.name + ".tmp")
    content = {
        "run": identity,
        "step": step,
        "heads": heads.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, temporary)
    os.replace(temporary, path)


def _resume(path: Path, identity: str, heads: TrainableHeads, optimizer: torch.optim.Optimizer) -> int:
    """Steps done by an unfinished run of the same kind, whose state is taken over; else 0."""
    if not path.exists():
        return 0
    content = torch.load(path, weights_only=True)
    if content["run"] != identity:
        return 0
    heads.load_state_dict(content["heads"])
    optimizer.load_state_dict(content["optimizer"])
    return int(content["step"])
