"""Calls of the C++ decoder ops (csrc/rows.cpp, csrc/attention.cpp); `kernels.ops` checks and dispatches."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import DTYPE_CODES, AttentionStruct, RopeStruct, SegmentStruct, library

if TYPE_CHECKING:
    from ..ops import SegmentBatch


class NativeSegments:
    """A batch's segments as C structures, with each token's slot and cache position (int64 [T])."""

    def __init__(self, batch: SegmentBatch) -> None:
        self.array = (SegmentStruct * max(1, len(batch)))()
        self.masks: list[Tensor] = []
        slots: list[int] = []
        places: list[int] = []
        for entry, segment in zip(self.array, batch, strict=False):
            entry.slot, entry.start, entry.count = segment.slot, segment.start, segment.count
            if segment.tree_mask is not None:
                self.masks.append(segment.tree_mask.contiguous())
                entry.tree_mask = self.masks[-1].data_ptr()
            slots += [segment.slot] * segment.count
            places += range(segment.start, segment.start + segment.count)
        self.slots, self.places = torch.tensor(slots), torch.tensor(places)

    @classmethod
    def of(cls, batch: SegmentBatch) -> NativeSegments:
        native = batch._native
        if not isinstance(native, cls):
            native = batch._native = cls(batch)
        return native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape)
    library().mq_rms_norm(
        rows.data_ptr(), rows.stride(0), None, weight.data_ptr(), eps, None, out.data_ptr(),
        rows.shape[0], rows.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = residual.contiguous()
    out, total = torch.empty(x.shape), torch.empty(x.shape)
    library().mq_rms_norm(
        x.data_ptr(), x.stride(0), residual.data_ptr(), weight.data_ptr(), eps, total.data_ptr(),
        out.data_ptr(), x.shape[0], x.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape)
    library().mq_swiglu(
        gate.data_ptr(), up.data_ptr(), gate.stride(0), out.data_ptr(), *gate.shape, torch.get_num_threads()
    )
    return out


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    batch: SegmentBatch,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    query, key, value = (_token_major(x) for x in (query, key, value))
    cos, sin = cos.contiguous(), sin.contiguous()
    segments = NativeSegments.of(batch)
    rotated = torch.empty(query.shape)
    job = RopeStruct(
        *(x.data_ptr() for x in (query, key, value, cos, sin, rotated, k, v)),
        segments.slots.data_ptr(), segments.places.data_ptr(),
        query.stride(0), key.stride(0), value.stride(0),
        *query.shape[:2], key.shape[1], query.shape[2], k.shape[2],
        DTYPE_CODES[k.dtype], torch.get_num_threads(),
    )  # fmt: skip
    library().mq_rope_write_kv(ctypes.addressof(job))
    return rotated


def attention(query: Tensor, batch: SegmentBatch, k: Tensor, v: Tensor) -> Tensor:
    query = query.contiguous()
    segments = NativeSegments.of(batch)
    out = torch.empty(query.shape)
    job = AttentionStruct(
        query.data_ptr(), k.data_ptr(), v.data_ptr(), ctypes.addressof(segments.array), out.data_ptr(),
        len(batch), query.shape[1], k.shape[1], query.shape[2], k.shape[2],
        1.0 / math.sqrt(query.shape[2]), DTYPE_CODES[k.dtype], torch.get_num_threads(),
    )  # fmt: skip
    library().mq_attention(ctypes.addressof(job))
    return out


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    values = torch.empty((rows, k))
    indices = torch.empty((rows, k), dtype=torch.int64)
    library().mq_top_k(
        logits.data_ptr(), logits.stride(0), DTYPE_CODES[logits.dtype], rows, width, k,
        values.data_ptr(), indices.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return values, indices


def _token_major(x: Tensor) -> Tensor:
    """[T, heads, head_dim] whose heads lie side by side; a slice of a wider matrix needs no copy."""
    if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()
