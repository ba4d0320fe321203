"""The Triton backend's packing: int4 and nf4 in interleaved blocks of 128 rows, int8 as it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...quantization import PER_CHANNEL, QuantizedWeight

BLOCK_ROWS = 128  # input features in one interleaved block
WORD_ROWS = 16  # words a block holds per output feature, each with 8 nibbles
NIBBLES = 8
_OFFSET = 8  # nibble = signed code + 8, so a padded row holds code 0


@dataclass(frozen=True, eq=False)
class TritonWeight:
    """The weights of `heads` matrices of one shape, ready for one launch.

    kind: `int4`, `nf4` or `int8`.
    qweight: int32 [heads, ceil(K/128)*16, N] for int4 and nf4 (see `interleave`); int8 [heads, K, N].
    scales: fp16 or fp32 [heads, G, N].
    zeros: int8 [heads, G, N] in the domain of signed codes, or None.
    table: fp32 [16], the value of each nibble (nf4), or None.
    in_features: K. group_size: input features sharing a scale, -1 for one scale per output channel.
    """

    kind: str
    qweight: Tensor
    scales: Tensor
    in_features: int
    group_size: int = PER_CHANNEL
    zeros: Tensor | None = None
    table: Tensor | None = None

    @property
    def heads(self) -> int:
        return int(self.qweight.shape[0])

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes a launch reads: codes, scales and zeros."""
        parts = (self.qweight, self.scales, self.zeros)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device | str) -> TritonWeight:
        """The same weight on another device."""
        moved: dict[str, Any] = {
            name: None if part is None else part.to(device)
            for name, part in (("zeros", self.zeros), ("table", self.table))
        }
        return replace(self, qweight=self.qweight.to(device), scales=self.scales.to(device), **moved)


def unsupported_group(group_size: int) -> str | None:
    """Why the kernels cannot take this group size, or None when they can."""
    if group_size != PER_CHANNEL and group_size % WORD_ROWS:
        return f"the group size must be a multiple of {WORD_ROWS}, not {group_size}"
    return None


def pack(weight: QuantizedWeight) -> TritonWeight:
    """Pack one weight (heads = 1). Raises ValueError for act-order and for an unsupported group size."""
    reason = unsupported_group(weight.group_size)
    if weight.g_idx is not None or reason is not None:
        raise ValueError(reason or "act-order weights (g_idx) have no contiguous groups")
    if weight.bits == 4:
        qweight = interleave((weight.codes() + _OFFSET).to(torch.uint8), pad=_OFFSET)
    else:
        qweight = weight.qweight.contiguous()
    return TritonWeight(
        f"int{weight.bits}",
        qweight[None],
        weight.scales.contiguous()[None],
        weight.in_features,
        weight.group_size,
        None if weight.zeros is None else weight.zeros.contiguous()[None],
    )


def unpack(packed: TritonWeight) -> list[QuantizedWeight]:
    """Inverse of `pack` and `stack`: one QuantizedWeight per head. Raises ValueError for nf4."""
    if packed.kind == "nf4":
        raise ValueError("nf4 codes are table entries, not an integer weight")
    weights = []
    for head in range(packed.heads):
        codes = packed.qweight[head]
        if packed.kind == "int4":
            codes = deinterleave(codes, packed.in_features).to(torch.int8) - _OFFSET
        zeros = None if packed.zeros is None else packed.zeros[head]
        bits = int(packed.kind[3:])
        weights.append(QuantizedWeight.from_codes(codes, packed.scales[head], bits, packed.group_size, zeros))
    return weights


def stack(weights: Sequence[TritonWeight]) -> TritonWeight:
    """Join weights of one shape and scheme along heads. Raises ValueError where they differ."""
    first = weights[0]
    described = {
        (w.kind, w.in_features, w.out_features, w.group_size, w.zeros is None, w.scales.dtype)
        for w in weights
    }
    if len(described) != 1:
        raise ValueError(f"heads must share shape and scheme, got {sorted(map(str, described))}")
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights if w.zeros is not None])
    return replace(
        first,
        qweight=torch.cat([w.qweight for w in weights]),
        scales=torch.cat([w.scales for w in weights]),
        zeros=zeros,
    )


def scale_span(group_size: int) -> int:
    """Rows one scale covers inside a block: the kernel applies a scale once per this many rows."""
    return BLOCK_ROWS if group_size == PER_CHANNEL else gcd(group_size, BLOCK_ROWS)


def interleave(nibbles: Tensor, pad: int) -> Tensor:
    """Nibbles uint8 [K, N] in [0, 15] -> int32 words [ceil(K/128)*16, N].

    Nibble j (bits 4j to 4j+3) of word r in block b holds row k = 128*b + 16*j + r, so that shifting one
    loaded [16, N] tile yields eight tiles of 16 consecutive rows. Rows beyond K hold `pad`.
    """
    rows, columns = nibbles.shape
    blocks = -(-rows // BLOCK_ROWS)
    padded = nibbles.new_full((blocks * BLOCK_ROWS, columns), pad)
    padded[:rows] = nibbles
    lanes = padded.view(blocks, NIBBLES, WORD_ROWS, columns)
    words = torch.zeros((blocks, WORD_ROWS, columns), dtype=torch.int32, device=nibbles.device)
    for lane in range(NIBBLES):
        words |= lanes[:, lane].int() << (4 * lane)
    return words.view(blocks * WORD_ROWS, columns)


def deinterleave(words: Tensor, in_features: int) -> Tensor:
    """Inverse of `interleave`: int32 words -> nibbles uint8 [K, N]."""
    columns = words.shape[1]
    blocks = words.view(-1, WORD_ROWS, columns)
    lanes = torch.stack([(blocks >> (4 * lane)) & 15 for lane in range(NIBBLES)], dim=1)
    return lanes.reshape(-1, columns)[:in_features].to(torch.uint8)
