"""One rank's share of draft heads: its own files of a workspace, or a slice of anything else."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..checkpoints import HeadTensor, MedusaHeads, load_heads
from ..errors import InputError
from ..quantization import QuantizedWeight
from ..verification import verify_rank
from ..workspace import Workspace
from ..workspace.sharding import Shard, check_shardable, shard_dense, shard_of, shard_quantized
from .model.lm_head import VOCAB
from .ranks import Ranks


def heads_of_rank(source: str | Path, ranks: Ranks) -> tuple[MedusaHeads, str]:
    """The heads with this rank's shards as tensors, and how their LM matrices are split (vocab or hidden).

    A workspace of the same tp: this rank's files alone are read, and checked against the manifest first. Of
    another tp, and other checkpoints: each matrix is read whole and sliced, with a warning on rank 0.
    Raises InputError for files that are missing or damaged, and where tp does not divide a matrix.
    """
    workspace = Workspace.find(source)
    if workspace is None or ranks.tp == 1:
        heads = load_heads(source)
        return (heads, VOCAB) if ranks.tp == 1 else (_sliced(heads, ranks, VOCAB), VOCAB)
    split, stored = workspace.manifest.lm_head_split, workspace.manifest.tp
    if stored == ranks.tp:
        failures = verify_rank(workspace, ranks.rank)
        if failures:
            raise InputError(f"rank {ranks.rank}: {failures[0]}")
        return load_heads(source, tp_rank=ranks.rank), split
    if ranks.leads:
        warnings.warn(
            f"{workspace.folder}: written for tp {stored}, so every rank reads all of it for tp {ranks.tp}; "
            f"avoid that with: medusa-quant convert {source} --tp {ranks.tp} --out DIR",
            stacklevel=2,
        )
    return _sliced(load_heads(source), ranks, split), split


def _sliced(heads: MedusaHeads, ranks: Ranks, split: str) -> MedusaHeads:
    tensors = {}
    for name, tensor in heads.tensors.items():
        bits = int(tensor.dtype.removeprefix("int")) if tensor.quantized else 0
        check_shardable(str(name), name.role, tensor.shape, ranks.tp, split, tensor.group_size, bits)
        shard = shard_of(name.role, tensor.shape, ranks.rank, ranks.tp, split)
        tensors[name] = _slice(tensor, shard)
    return replace(heads, tensors=tensors)


def _slice(tensor: HeadTensor, shard: Shard) -> HeadTensor:
    def load() -> Tensor | QuantizedWeight:
        value = tensor.load()
        if isinstance(value, QuantizedWeight):
            return shard_quantized(value, shard)
        part = shard_dense(value, shard)
        return part.t() if part.ndim == 2 else part

    return replace(tensor, load=load)
