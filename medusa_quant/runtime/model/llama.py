"""The Llama-family decoder over a slot cache: token ids and positions in, final hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import ops
from ...kernels.cpu.decoder import DecoderWeights, NativeDecoder
from ...kernels.tree_rows import TreeRows
from .cache import KVCache, Segment
from .config import ModelConfig
from .linear import Linear
from .lm_head import LMHead
from .rope import RopeTable
from .split import WHOLE_MODEL, Split


@dataclass
class Layer:
    """Weights of one decoder layer; q/k/v and gate/up are one matrix each (they share their input)."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass
class LlamaModel:
    """A base model ready to run.

    embedding: rows [V, H] in the checkpoint's own 16-bit dtype or fp32; only rows looked up are read.
    lm_head: the (possibly tied) LM matrix. dtype: what linears are stored in. activation_dtype: fp32 on
    the CPU. split: which matrices hold this rank's outputs only. A token's hidden state does not depend on
    what else is in the batch, nor on tp: ranks exchange outputs, never partial sums.
    """

    config: ModelConfig
    embedding: Tensor
    layers: list[Layer]
    final_norm: Tensor
    lm_head: LMHead
    dtype: str
    activation_dtype: torch.dtype
    device: torch.device
    split: Split = WHOLE_MODEL

    def __post_init__(self) -> None:
        self._caches = count()
        self._rope = RopeTable(self.config, self.device)
        self._native = _native_decoder(self)

    def new_cache(self, slots: int, max_len: int) -> KVCache:
        """An empty cache for `slots` requests of up to max_len tokens each."""
        config = self.config
        self.split.ranks.tell("new_cache", slots, max_len)
        return KVCache(
            config.num_layers,
            slots,
            self.split.share(config.num_kv_heads, self.split.attention),
            max_len,
            config.head_dim,
            self.activation_dtype,
            self.device,
            next(self._caches),
        )

    def reserve_positions(self, count: int) -> None:
        """Make rope ready for positions 0 to count - 1."""
        self._rope.reserve(count)

    def compact(self, cache: KVCache, slot: int, start: int, path: Sequence[int]) -> None:
        """See `KVCache.compact`; on every rank."""
        self.split.ranks.tell("compact", cache.number, slot, start, path)
        cache.compact(slot, start, path)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, segments: Sequence[Segment] | TreeRows, cache: KVCache
    ) -> Tensor:
        """Run T tokens through all layers, writing their keys and values into the cache.

        token_ids, positions (for rope): int64 [T], T the sum of the segments' counts, in their order; or
        requests * nodes of `TreeRows`, which go through tensors alone, on one rank, after
        `reserve_positions`.
        Returns hidden states [T, H] after the final norm.
        """
        config, split = self.config, self.split
        tokens = token_ids.shape[0]
        if not tokens:
            return torch.empty((0, config.hidden_size), dtype=self.activation_dtype, device=self.device)
        batch: ops.SegmentBatch | TreeRows
        if isinstance(segments, TreeRows):
            batch = segments
        else:
            split.ranks.tell("forward", token_ids, positions, list(segments), cache.number)
            batch = ops.SegmentBatch(segments)
            self.reserve_positions(int(positions.max()) + 1)
        cos, sin = self._rope.cos[positions], self._rope.sin[positions]
        x = F.embedding(token_ids, self.embedding).to(self.activation_dtype)
        if self._native is not None and isinstance(batch, ops.SegmentBatch):
            x = self._native.run(x, cos, sin, batch, cache.k, cache.v)
            return ops.rms_norm(x, self.final_norm, config.rms_norm_eps)
        heads, kv_heads = (split.share(n, split.attention) for n in (config.num_heads, config.num_kv_heads))
        q_size, kv_size = heads * config.head_dim, kv_heads * config.head_dim
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(ops.rms_norm(x, layer.input_norm, config.rms_norm_eps))
            query, key, value = qkv.split([q_size, kv_size, kv_size], dim=1)
            query = query.view(tokens, heads, config.head_dim)
            key = key.view(tokens, kv_heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                query = ops.rms_norm(query, layer.q_norm, config.rms_norm_eps)
                key = ops.rms_norm(key, layer.k_norm, config.rms_norm_eps)
            value = value.view(tokens, kv_heads, config.head_dim)
            query = ops.rope_write_kv(query, key, value, cos, sin, batch, cache.k[index], cache.v[index])
            mixed = ops.attention(query, batch, cache.k[index], cache.v[index])
            x = split.project(layer.o, mixed.view(tokens, q_size), x, split.attention)
            gate, up = layer.gate_up(ops.rms_norm(x, layer.post_norm, config.rms_norm_eps)).chunk(2, dim=1)
            x = split.project(layer.down, ops.swiglu(gate, up), x, split.mlp)
        return ops.rms_norm(x, self.final_norm, config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [n, V] of final hidden states [n, H]."""
        self.split.ranks.tell("logits", hidden)
        return self.lm_head(hidden).float()


def _native_decoder(model: LlamaModel) -> NativeDecoder | None:
    """All layers as one call where our CPU kernels run every one of them, whole."""
    if model.split.ranks.tp > 1:
        return None
    layers = []
    for layer in model.layers:
        qkv, o, gate_up, down = (part.native for part in (layer.qkv, layer.o, layer.gate_up, layer.down))
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        layers.append(
            DecoderWeights(
                layer.input_norm, qkv, layer.q_norm, layer.k_norm, o, layer.post_norm, gate_up, down
            )
        )
    if not layers or model.activation_dtype != torch.float32:
        return None
    config = model.config
    return NativeDecoder(layers, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
