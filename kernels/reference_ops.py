"""What a decoder needs beside GEMMs, in plain torch: the oracle of `ops`, and its fallback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Segment(Protocol):
    """Consecutive query tokens of one request: query i stands at cache position start + i of its slot.

    It sees positions [0, start) and, within the segment, tokens j <= i, or those where tree_mask[i, j]
    (bool [count, count], diagonal true) is set.
    """

    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def tree_mask(self) -> Tensor | None: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * weight [H], in fp32 (Zhang and Sennrich 2019)."""
    values = x.float()
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, I]. In fp64 on the CPU: torch's vector and scalar exponentials differ in
    the last bit, and which of them a value meets depends on the batch."""
    precise = gate.double() if gate.device.type == "cpu" else gate
    return F.silu(precise).to(gate.dtype) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by cos and sin [T, head_dim / 2]: the halves form the pairs."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Sequence[Segment],
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Rotated query [T, heads, head_dim]; the rotated key and the value go into the cache.

    query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; cos, sin fp32 [T, head_dim / 2].
    k, v: one layer's cache [slots, kv_heads, max_len, head_dim], written at the segments' positions.
    """
    rotated, first = rope(key, cos, sin), 0
    for segment in segments:
        rows = slice(first, first + segment.count)
        places = slice(segment.start, segment.start + segment.count)
        k[segment.slot, :, places] = rotated[rows].transpose(0, 1).to(k.dtype)
        v[segment.slot, :, places] = value[rows].transpose(0, 1).to(v.dtype)
        first += segment.count
    return rope(query, cos, sin)


def attention(query: Tensor, segments: Sequence[Segment], k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over what each token sees: [T, heads, head_dim], as the query.

    query after rope; k, v: one layer's cache [slots, kv_heads, max_len, head_dim]. On the CPU sums are in
    fp64, so that rounding to fp32 hides the order in which a batch formed them.
    """
    accumulate = torch.float64 if query.device.type == "cpu" else torch.float32
    output, first = torch.empty_like(query), 0
    for segment in segments:
        rows = slice(first, first + segment.count)
        output[rows] = _attend(query[rows].to(accumulate), segment, k, v).to(query.dtype)
        first += segment.count
    return output


def _attend(query: Tensor, segment: Segment, k: Tensor, v: Tensor) -> Tensor:
    count, heads, head_dim = query.shape
    end = segment.start + segment.count
    keys = k[segment.slot, :, :end].to(query.dtype)
    values = v[segment.slot, :, :end].to(query.dtype)
    grouped = query.reshape(count, keys.shape[0], -1, head_dim)
    scores = torch.einsum("tgqd,gsd->gqts", grouped, keys) / math.sqrt(head_dim)
    scores.masked_fill_(~visible(segment, query.device), -math.inf)
    mixed = torch.einsum("gqts,gsd->tgqd", torch.softmax(scores, dim=-1), values)
    return mixed.reshape(count, heads, head_dim)


def visible(segment: Segment, device: torch.device) -> Tensor:
    """bool [count, start + count]: which cache positions each query of a segment sees."""
    before = torch.ones((segment.count, segment.start), dtype=torch.bool, device=device)
    if segment.tree_mask is not None:
        within = segment.tree_mask.to(device)
    else:
        within = torch.ones((segment.count, segment.count), dtype=torch.bool, device=device).tril()
    return torch.cat([before, within], dim=1)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values fp32 and indices int64 [M, k] of the k largest of each row [M, V], descending; equal values
    by ascending index, NaN above every number."""
    values, indices = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].contiguous()
