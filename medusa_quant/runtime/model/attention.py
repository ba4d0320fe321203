"""Attention over the slot cache in plain torch: the oracle, and the fallback where no kernel applies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import Segment


def write_kv(key: Tensor, value: Tensor, segments: Sequence[Segment], k: Tensor, v: Tensor) -> None:
    """Store key and value [T, kv_heads, head_dim] of a batch at the segments' positions of one layer's
    cache [slots, kv_heads, max_len, head_dim]; T is the sum of the segments' counts."""
    first = 0
    for segment in segments:
        rows = slice(first, first + segment.count)
        places = slice(segment.start, segment.start + segment.count)
        k[segment.slot, :, places] = key[rows].transpose(0, 1).to(k.dtype)
        v[segment.slot, :, places] = value[rows].transpose(0, 1).to(v.dtype)
        first += segment.count


def attend(query: Tensor, segments: Sequence[Segment], k: Tensor, v: Tensor) -> Tensor:
    """Attention output [T, heads, head_dim] for query [T, heads, head_dim] (after rope).

    On the CPU sums are in fp64: a sum's order depends on how the tokens were batched, and rounding to
    fp32 afterwards hides that, so that a token's result does not depend on its batch.
    """
    accumulate = torch.float64 if query.device.type == "cpu" else torch.float32
    output = torch.empty_like(query)
    first = 0
    for segment in segments:
        rows = slice(first, first + segment.count)
        output[rows] = _attend_segment(query[rows].to(accumulate), segment, k, v).to(query.dtype)
        first += segment.count
    return output


def _attend_segment(query: Tensor, segment: Segment, k: Tensor, v: Tensor) -> Tensor:
    count, heads, head_dim = query.shape
    end = segment.start + segment.count
    keys = k[segment.slot, :, :end].to(query.dtype)
    values = v[segment.slot, :, :end].to(query.dtype)
    grouped = query.view(count, keys.shape[0], -1, head_dim)
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
