"""What a decoder needs beside GEMMs: C++ on the CPU in fp32, torch (`reference_ops`) for anything else.

On either path a row's result does not depend on the other rows of the batch, bit for bit, and a tree node
gets what it would get had its path been decoded token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import dispatch, reference_ops
from .cpu import ops as native
from .reference_ops import Segment
from .tree_rows import TreeRows


class SegmentBatch(Sequence[Segment]):
    """The segments of a batch, checked and brought into C form once for all layers.

    Pass it wherever segments are asked for. tokens: T, the sum of the counts.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = list(segments)
        self.tokens = sum(segment.count for segment in self._segments)
        self.highest = max((s.start + s.count for s in self._segments), default=0)
        self.highest_slot = max((s.slot for s in self._segments), default=-1)
        self.lowest = min((min(s.slot, s.start, s.count) for s in self._segments), default=0)
        for segment in self._segments:
            mask = segment.tree_mask
            if mask is None:
                continue
            if mask.shape != (segment.count, segment.count) or mask.dtype != torch.bool:
                raise ValueError(f"tree_mask must be bool [{segment.count}, {segment.count}]")
            if not bool(mask.diagonal().all()):
                raise ValueError("tree_mask must have a true diagonal: a token sees itself")
        self._native: object = None

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._segments[index]

    def __len__(self) -> int:
        return len(self._segments)

    def check(self, tokens: int, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless these segments fit T tokens and the cache: native code would not."""
        if tokens != self.tokens:
            raise ValueError(f"{tokens} tokens do not fill segments of {self.tokens}")
        if k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(f"k {k.dtype} {list(k.shape)} and v {v.dtype} {list(v.shape)} must be alike")
        if self.highest > k.shape[2] or self.highest_slot >= k.shape[0] or self.lowest < 0:
            raise ValueError(f"segments leave the cache of {k.shape[0]} slots x {k.shape[2]} positions")


def _batch(segments: Sequence[Segment]) -> SegmentBatch:
    return segments if isinstance(segments, SegmentBatch) else SegmentBatch(segments)


def _native(*tensors: Tensor) -> bool:
    """Whether the C++ ops take these: fp32 on the CPU, contiguous along the last dimension."""
    for x in tensors:
        if x.dtype is not torch.float32 or not x.is_cpu or (x.stride(-1) != 1 and x.shape[-1] > 1):
            return False
    return dispatch.unavailable("cpu") is None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * weight [H], in x's dtype."""
    if not (_native(x, weight) and x.numel()):
        return reference_ops.rms_norm(x, weight, eps)
    return native.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x, residual [T, H]."""
    if not (_native(x, residual, weight) and x.numel()):
        total = x + residual
        return reference_ops.rms_norm(total, weight, eps), total
    return native.add_rms_norm(x, residual, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, I] (halves of one matrix need no copy)."""
    if not (_native(gate, up) and gate.numel() and gate.ndim == 2 and gate.stride() == up.stride()):
        return reference_ops.swiglu(gate, up)
    return native.swiglu(gate, up)


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Sequence[Segment] | TreeRows,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """As `reference_ops.rope_write_kv`: rotates query and key, writes key and value into the cache.

    cache dtype fp32, fp16 or bf16, contiguous. Raises ValueError where segments leave the cache.
    """
    if isinstance(segments, TreeRows):
        return segments.write(query, key, value, cos, sin, k, v)
    batch = _batch(segments)
    batch.check(query.shape[0], k, v)
    if not (_native(query, key, value, cos, sin) and k.is_contiguous() and v.is_contiguous()):
        return reference_ops.rope_write_kv(query, key, value, cos, sin, batch, k, v)
    return native.rope_write_kv(query, key, value, cos, sin, batch, k, v)


def attention(query: Tensor, segments: Sequence[Segment] | TreeRows, k: Tensor, v: Tensor) -> Tensor:
    """As `reference_ops.attention`: [T, heads, head_dim] over the slot cache, with GQA and tree masks."""
    if isinstance(segments, TreeRows):
        return segments.attend(query, k, v)
    batch = _batch(segments)
    batch.check(query.shape[0], k, v)
    if query.shape[1] % k.shape[1] or query.shape[2] != k.shape[3]:
        raise ValueError(f"query {list(query.shape)} does not fit a cache {list(k.shape)}")
    if not (_native(query) and k.is_contiguous() and v.is_contiguous()):
        return reference_ops.attention(query, batch, k, v)
    return native.attention(query, batch, k, v)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values fp32 and indices int64 [M, k] of the k largest of each row [M, V], descending; equal values
    by ascending index, NaN above every number. Raises ValueError unless 1 <= k <= V."""
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in [1, V] for logits [M, V], got k {k}, {list(logits.shape)}")
    on_cpu = logits.device.type == "cpu" and logits.stride(1) == 1
    if not (on_cpu and logits.dtype in (torch.float32, torch.float16, torch.bfloat16) and k <= 256):
        return reference_ops.top_k(logits, k)
    if dispatch.unavailable("cpu") is not None:
        return reference_ops.top_k(logits, k)
    return native.top_k(logits, k)


def argmax(logits: Tensor) -> Tensor:
    """int64 [M]: index of each row's largest value, the first of equal ones, as `torch.argmax`."""
    return top_k(logits, 1)[1][:, 0]
