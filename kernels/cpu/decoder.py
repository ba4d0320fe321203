"""All decoder layers in one native call (csrc/decoder.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backend import PreparedWeight
from .gemm import CpuWeight
from .library import DTYPE_CODES, DecoderStruct, LayerStruct, LinearStruct, library
from .ops import NativeSegments

if TYPE_CHECKING:
    from ..ops import SegmentBatch

# (weight, bias fp32 [N] or None)
Part = tuple[PreparedWeight, Tensor | None]


@dataclass(frozen=True)
class DecoderWeights:
    """One layer: norms fp32 (q_norm and k_norm or None), q/k/v and gate/up each as one matrix."""

    input_norm: Tensor
    qkv: Part
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Part
    post_norm: Tensor
    gate_up: Part
    down: Part


class NativeDecoder:
    """The layers of a decoder, as pointers set up once. All weights must be prepared by backend cpu."""

    def __init__(
        self, layers: Sequence[DecoderWeights], heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> None:
        self._heads, self._kv_heads, self._head_dim, self._eps = heads, kv_heads, head_dim, eps
        self._keep = [_contiguous(layer) for layer in layers]
        self._layers = (LayerStruct * len(layers))()
        for struct, layer in zip(self._layers, self._keep, strict=True):
            for name in ("input_norm", "q_norm", "k_norm", "post_norm"):
                norm = getattr(layer, name)
                setattr(struct, name, None if norm is None else norm.data_ptr())
            for name in ("qkv", "o", "gate_up", "down"):
                weight, bias = getattr(layer, name)
                assert isinstance(weight, CpuWeight)
                planes = weight.planes(torch.float32) if weight.is_integer else 1
                setattr(
                    struct,
                    name,
                    LinearStruct(weight.address, None if bias is None else bias.data_ptr(), planes),
                )
        self._inner = layers[0].down[0].in_features

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: SegmentBatch,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
    ) -> Tensor:
        """Hidden states before the final norm, in x's memory.

        x: fp32 [T, H], contiguous: embeddings, overwritten. cos, sin: fp32 [T, head_dim / 2]. k, v: each
        layer's cache [slots, kv_heads, max_len, head_dim], contiguous.
        """
        batch.check(x.shape[0], k[0], v[0])
        segments = NativeSegments.of(batch)
        for struct, keys, values in zip(self._layers, k, v, strict=True):
            struct.k_cache, struct.v_cache = keys.data_ptr(), values.data_ptr()
        cos, sin = cos.contiguous(), sin.contiguous()
        job = DecoderStruct(
            ctypes.addressof(self._layers), x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            ctypes.addressof(segments.array), segments.slots.data_ptr(), segments.places.data_ptr(),
            len(self._layers), x.shape[0], len(batch), x.shape[1], self._inner,
            self._heads, self._kv_heads, self._head_dim, k[0].shape[2],
            self._eps, DTYPE_CODES[k[0].dtype], torch.get_num_threads(),
        )  # fmt: skip
        library().mq_decode(ctypes.addressof(job))
        return x


def _contiguous(layer: DecoderWeights) -> DecoderWeights:
    def norm(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.float().contiguous()

    def part(value: Part) -> Part:
        return value[0], norm(value[1])

    input_norm, post_norm = norm(layer.input_norm), norm(layer.post_norm)
    assert input_norm is not None
    assert post_norm is not None
    return DecoderWeights(
        input_norm,
        part(layer.qkv),
        norm(layer.q_norm),
        norm(layer.k_norm),
        part(layer.o),
        post_norm,
        part(layer.gate_up),
        part(layer.down),
    )
