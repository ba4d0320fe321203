"""Bringing weights into the order the CPU kernels stream them, and back (layouts: csrc/gemm.h)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...quantization import QuantizedWeight
from ...quantization.packing import OFFSET

PANEL = 32
STEP = 8
# Activations get a scale of their own at least this often, however long a weight's group is.
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class Segments:
    """How K is cut: runs of whole steps of 8 slots, each slot one input feature or padding.

    starts: int32 [S + 1], first step of each segment. scale_row: int32 [S], its row of scales.
    feature: int32 [steps * 8], the input feature in each slot, -1 for padding.
    layout: an id equal for equal cuts, so that weights sharing x also share its packed form.
    """

    starts: Tensor
    scale_row: Tensor
    feature: Tensor
    layout: int

    @property
    def identity(self) -> bool:
        """Whether slot i simply holds feature i, without padding."""
        return torch.equal(self.feature, torch.arange(len(self.feature), dtype=torch.int32))


def segments_of(weight: QuantizedWeight) -> Segments:
    """The cut of a weight's input features; act-order weights are sorted by group, stably."""
    if weight.g_idx is None:
        return _sequential_segments(weight.in_features, max(1, weight.scheme.group_width(weight.in_features)))
    group = weight.group_index()
    order = torch.argsort(group, stable=True)
    present, counts = torch.unique_consecutive(group[order], return_counts=True)
    return _cut(order, list(zip(present.tolist(), counts.tolist(), strict=True)))


@lru_cache(maxsize=256)
def _sequential_segments(in_features: int, width: int) -> Segments:
    runs = [(row, min(width, in_features - row * width)) for row in range(-(-in_features // width))]
    return _cut(torch.arange(in_features), runs)


def _cut(order: Tensor, runs: list[tuple[int, int]]) -> Segments:
    slots, starts, rows, position = [], [0], [], 0
    for row, count in runs:
        for begin in range(0, count, ACTIVATION_GROUP):
            features = order[position + begin : position + min(begin + ACTIVATION_GROUP, count)]
            padding = -len(features) % STEP
            slots.append(torch.cat([features, features.new_full((padding,), -1)]))
            starts.append(starts[-1] + len(slots[-1]) // STEP)
            rows.append(row)
        position += count
    feature = torch.cat(slots).int() if slots else torch.empty(0, dtype=torch.int32)
    bounds, scale_row = torch.tensor(starts, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)
    digest = hashlib.sha256(feature.numpy().tobytes() + b"|" + bounds.numpy().tobytes()).digest()
    return Segments(bounds, scale_row, feature, int.from_bytes(digest[:7], "little"))


def pack_codes(codes: Tensor, feature: Tensor, bits: int) -> Tensor:
    """Signed codes int8 [K, N] -> uint8 [panels, steps, 2, 32, 4], or [panels, steps, 32, 4] for int4.

    int4 holds features 0..3 of a step in the low nibbles and 4..7 in the high ones. Codes are stored
    unsigned, with 8 or 128 added; padding is code 0.
    """
    outputs = codes.shape[1]
    panels = -(-outputs // PANEL)
    unsigned = codes.new_full((len(feature), panels * PANEL), 0)
    real = feature >= 0
    unsigned[real, :outputs] = codes[feature[real].long()]
    unsigned = unsigned.view(torch.uint8) + (OFFSET if bits == 4 else 128)
    steps = unsigned.view(-1, 2, 4, panels, PANEL).permute(3, 0, 1, 4, 2)
    if bits == 4:
        return (steps[:, :, 0] | (steps[:, :, 1] << 4)).contiguous()
    return steps.contiguous()


def unpack_codes(packed: Tensor, feature: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """Inverse of `pack_codes`: signed int8 [K, N]."""
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], dim=2)
    panels = packed.shape[0]
    unsigned = packed.permute(1, 2, 4, 0, 3).reshape(-1, panels * PANEL)
    signed = (unsigned - (OFFSET if bits == 4 else 128)).view(torch.int8)
    codes = torch.empty(shape, dtype=torch.int8)
    real = feature >= 0
    codes[feature[real].long()] = signed[real, : shape[1]]
    return codes


def pack_columns(values: Tensor) -> Tensor:
    """Scales or zeros [G, N] -> [panels, G, 32], padded with ones."""
    groups, outputs = values.shape
    panels = -(-outputs // PANEL)
    padded = values.new_ones((groups, panels * PANEL))
    padded[:, :outputs] = values
    return padded.view(groups, panels, PANEL).permute(1, 0, 2).contiguous()


def unpack_columns(packed: Tensor, outputs: int) -> Tensor:
    """Inverse of `pack_columns`: [G, N]."""
    return packed.permute(1, 0, 2).reshape(packed.shape[1], -1)[:, :outputs].contiguous()


def pack_dense(weight: Tensor) -> Tensor:
    """Float matrix [N, K] -> [panels, K, 32] (fp32, fp16), or [panels, ceil(K/2), 32, 2] (bf16)."""
    outputs, features = weight.shape
    panels = -(-outputs // PANEL)
    paired = weight.dtype == torch.bfloat16
    padded = weight.new_zeros((panels * PANEL, features + (features % 2 if paired else 0)))
    padded[:outputs, :features] = weight
    if paired:
        return padded.view(panels, PANEL, -1, 2).permute(0, 2, 1, 3).contiguous()
    return padded.view(panels, PANEL, features).permute(0, 2, 1).contiguous()


def unpack_dense(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverse of `pack_dense`: [N, K], for shape (K, N)."""
    features, outputs = shape
    if packed.ndim == 4:
        packed = packed.permute(0, 2, 1, 3).reshape(packed.shape[0], PANEL, -1).permute(0, 2, 1)
    return packed.permute(0, 2, 1).reshape(packed.shape[0] * PANEL, -1)[:outputs, :features].contiguous()
