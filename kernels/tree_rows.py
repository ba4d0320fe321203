"""Attention for one and the same tree in several slots: tensors alone, so that a CUDA graph can hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference_ops import rope


@dataclass(frozen=True)
class TreeRows:
    """B requests, each with n query tokens: node i of request b stands at cache position start[b] + i.

    slot, start: int64 [B]. mask: bool [n, n], the nodes each node sees; all see positions before start.
    span: keys looked at, at least the largest start + n.
    """

    slot: Tensor
    start: Tensor
    mask: Tensor
    span: int

    def write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """As `reference_ops.rope_write_kv`, for T = B * n tokens."""
        places = self.start.unsqueeze(1) + torch.arange(self.mask.shape[0], device=self.start.device)
        for cache, rows in ((k, rope(key, cos, sin)), (v, value)):
            cache[self.slot.unsqueeze(1), :, places] = rows.view(*places.shape, *rows.shape[1:]).to(
                cache.dtype
            )
        return rope(query, cos, sin)

    def attend(self, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `reference_ops.attention`: [T, heads, head_dim]."""
        nodes = self.mask.shape[0]
        offset = torch.arange(self.span, device=self.start.device) - self.start.unsqueeze(1)
        within = self.mask[:, offset.clamp(0, nodes - 1)].transpose(0, 1)
        seen = (offset < 0).unsqueeze(1) | (within & (offset < nodes).unsqueeze(1))
        grouped = query.view(len(self.slot), nodes, *query.shape[1:]).transpose(1, 2)
        keys, values = (cache[self.slot, :, : self.span].to(query.dtype) for cache in (k, v))
        mixed = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=seen.unsqueeze(1), enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(query.shape)
