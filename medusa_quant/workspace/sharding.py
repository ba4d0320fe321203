"""Tensor-parallel sharding: which part of a tensor a rank holds, and the merge back.

One rule for planner, writer, reader and runtime. Matrices are in the stored orientation [K, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoints.heads import BIAS, LM_HEAD, TOKEN_MAP, WEIGHT
from ..errors import InputError
from ..quantization import PER_CHANNEL, QuantizedWeight
from ..quantization.scheme import GROUP_SIZES

OUTPUT, INPUT, REPLICATED = "output", "input", "replicated"
LM_HEAD_SPLITS = ("vocab", "hidden")
VOCAB_MULTIPLE = 64  # per rank
# Parts of a quantized matrix without an output dimension: whole on every rank of an output split.
_BY_INPUT = ("g_idx", "low_rank_a")


class Shard(NamedTuple):
    """Features start..stop along `axis` (output or input) of a tensor whose true size there is `size`.

    stop may exceed size: the vocabulary is padded, see `padded_vocab`.
    """

    axis: str
    start: int
    stop: int
    size: int


def padded_vocab(vocab_size: int, tp: int) -> int:
    """V rounded up to a multiple of tp * 64, so that every rank holds the same number of rows."""
    multiple = tp * VOCAB_MULTIPLE
    return -(-vocab_size // multiple) * multiple


def shard_of(role: str, shape: Sequence[int], rank: int, tp: int, lm_head_split: str) -> Shard:
    """The shard of one rank. shape: (out, in) of a matrix or (out,) of a bias.

    ResBlocks and their biases split on the output; LM matrices on the output (`vocab`) or the input
    (`hidden`); a token map is replicated. Divisibility is checked by `check_shardable`.
    """
    if role == TOKEN_MAP:
        return Shard(REPLICATED, 0, shape[0], shape[0])
    axis, size = (INPUT, shape[1]) if role == LM_HEAD and lm_head_split == "hidden" else (OUTPUT, shape[0])
    total = padded_vocab(size, tp) if role == LM_HEAD and axis == OUTPUT else size
    width = total // tp
    return Shard(axis, rank * width, (rank + 1) * width, size)


def check_shardable(
    what: str, role: str, shape: Sequence[int], tp: int, lm_head_split: str, group_size: int | None, bits: int
) -> None:
    """Raise InputError where tp does not divide a feature count, or a K split would cut a quantization group.

    group_size: None for float weights, -1 per channel. bits: of the target, 0 for float.
    """
    if tp == 1 or role not in (WEIGHT, BIAS, LM_HEAD):
        return
    shard = shard_of(role, shape, 0, tp, lm_head_split)
    if shard.axis == OUTPUT and role == LM_HEAD:
        return
    if shard.size % tp:
        raise InputError(
            f"{what}: {shard.size} features are not divisible by tp {tp}",
            fix=f"choose a tp that divides {shard.size}",
        )
    if shard.axis != INPUT or bits == 0:
        return
    step = shard.size // tp
    unit = 1 if group_size in (None, PER_CHANNEL) else group_size
    if bits == 4 and step % 2:
        raise InputError(
            f"{what}: the hidden split cuts a byte of int4 codes, {step} input features a rank",
            fix="choose --lm-head-split vocab",
        )
    if unit is not None and step % unit:
        fitting = [str(size) for size in GROUP_SIZES if step % size == 0]
        advice = f"choose --group-size {fitting[-1]}" if fitting else "choose --group-size -1"
        raise InputError(
            f"{what}: the hidden split at {step} input features a rank cuts a group of {unit}",
            fix=f"{advice}, or --lm-head-split vocab",
        )


def take(tensor: Tensor, dim: int, start: int, stop: int, size: int) -> Tensor:
    """Features start..stop of `dim`, a view where possible.

    Beyond `size` stand copies of feature 0: its logit can be equalled but never beaten by them, so an
    argmax that takes the first maximum never lands on a padding row (a zero row would win wherever all
    logits are negative). Readers still mask by the true V.
    """
    if stop <= size:
        return tensor.narrow(dim, start, stop - start)
    real = max(0, size - start)
    first = tensor.narrow(dim, 0, 1)
    padding = first.expand(*(stop - start - real if d == dim else n for d, n in enumerate(first.shape)))
    return torch.cat([tensor.narrow(dim, start, real), padding], dim) if real else padding.contiguous()


def shard_dense(value: Tensor, shard: Shard) -> Tensor:
    """Part of a float tensor given as (out, in) [N, K] or [N]; matrices come back as a [K, N] view."""
    if shard.axis == REPLICATED:
        return value
    dim = 1 if shard.axis == INPUT else 0
    part = take(value, dim, shard.start, shard.stop, shard.size)
    return part.t() if part.ndim == 2 else part


def shard_quantized(weight: QuantizedWeight, shard: Shard) -> QuantizedWeight:
    """Part of a quantized matrix: the same codes and scales, bit for bit."""
    if shard.axis == OUTPUT:
        parts: dict[str, Any] = {
            name: take(tensor, 1, shard.start, shard.stop, shard.size)
            for name, tensor in weight.tensors().items()
            if name not in _BY_INPUT
        }
        return replace(weight, **parts)
    pack = 2 if weight.bits == 4 else 1
    rows = slice(shard.start // pack, -(-shard.stop // pack))
    return replace(
        weight,
        qweight=weight.qweight[rows],
        in_features=shard.stop - shard.start,
        g_idx=None if weight.g_idx is None else weight.g_idx[shard.start : shard.stop],
        low_rank_a=None if weight.low_rank_a is None else weight.low_rank_a[shard.start : shard.stop],
        **({} if _scales_replicated(weight) else _group_slice(weight, shard)),
    )


def merge_dense(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """Inverse of `shard_dense` over all ranks: stored [K, N] parts (or [N]) -> (out, in) [N, K] (or [N])."""
    if shard.axis == REPLICATED:
        return parts[0]
    if parts[0].ndim == 1:
        return torch.cat(list(parts))[: shard.size]
    merged = parts[0] if len(parts) == 1 else torch.cat(list(parts), 0 if shard.axis == INPUT else 1)
    return merged.t()[: shard.size] if shard.axis == OUTPUT else merged.t()


def merge_quantized(parts: Sequence[QuantizedWeight], shard: Shard) -> QuantizedWeight:
    """Inverse of `shard_quantized` over all ranks, vocabulary padding removed."""
    first = parts[0]
    if shard.axis == OUTPUT:
        merged: dict[str, Any] = {
            name: torch.cat([part.tensors()[name] for part in parts], 1)[:, : shard.size].contiguous()
            for name in first.tensors()
            if name not in _BY_INPUT
        }
        return replace(first, **merged)
    names = ["qweight", "low_rank_a"]
    if not _scales_replicated(first):
        names += ["scales", "zeros"]
    rows: dict[str, Any] = {
        name: torch.cat([part.tensors()[name] for part in parts], 0)
        for name in names
        if name in first.tensors()
    }
    g_idx = (
        None if first.g_idx is None else torch.cat([part.g_idx for part in parts if part.g_idx is not None])
    )
    return replace(first, in_features=sum(part.in_features for part in parts), g_idx=g_idx, **rows)


def _scales_replicated(weight: QuantizedWeight) -> bool:
    return weight.group_size == PER_CHANNEL or weight.g_idx is not None


def _group_slice(weight: QuantizedWeight, shard: Shard) -> dict[str, Any]:
    groups = slice(shard.start // weight.group_size, -(-shard.stop // weight.group_size))
    parts = {"scales": weight.scales[groups]}
    if weight.zeros is not None:
        parts["zeros"] = weight.zeros[groups]
    return parts
