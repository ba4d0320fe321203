"""NF4 weights (QLoRA, Dettmers et al. 2023): 16 table values, a scale per block of input features."""

from __future__ import annotations

import torch
from torch import Tensor

from .weight import TritonWeight, deinterleave, interleave

# bitsandbytes' table (functional.get_4bit_type("nf4")): quantiles of a normal distribution in [-1, 1].
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_ZERO = NF4_TABLE.index(0.0)


def pack_nf4(codes: Tensor, scales: Tensor, block_size: int = 64) -> TritonWeight:
    """Pack NF4 codes uint8 [K, N] in [0, 15] with scales [ceil(K/block_size), N], fp16 or fp32."""
    table = torch.tensor(NF4_TABLE, dtype=torch.float32, device=codes.device)
    words = interleave(codes, pad=_ZERO)
    return TritonWeight(
        "nf4", words[None], scales.contiguous()[None], codes.shape[0], block_size, None, table
    )


def from_bitsandbytes(
    packed: Tensor, absmax: Tensor, shape: tuple[int, int], block_size: int
) -> TritonWeight:
    """Repack `bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")` of a weight [N, K].

    packed: uint8, two codes a byte in row-major order, the high nibble first. absmax: fp32, one per block
    of `block_size` values (not double-quantized). shape: (N, K).
    Raises ValueError where blocks cross rows (K % block_size != 0): such a scale has no column.
    """
    outputs, features = shape
    if features % block_size:
        raise ValueError(f"K = {features} is not a multiple of the block size {block_size}")
    flat = packed.flatten()
    codes = torch.stack([flat >> 4, flat & 15], dim=1).view(outputs, features)
    scales = absmax.float().view(outputs, features // block_size)
    return pack_nf4(codes.t(), scales.t(), block_size)


def dequantize_nf4(packed: TritonWeight) -> Tensor:
    """Values fp32 [heads, K, N]."""
    if packed.table is None:
        raise ValueError(f"{packed.kind} has no table")
    rows = torch.arange(packed.in_features, device=packed.qweight.device) // packed.group_size
    heads = [
        packed.table[deinterleave(words, packed.in_features).long()] * scales.float()[rows]
        for words, scales in zip(packed.qweight, packed.scales, strict=True)
    ]
    return torch.stack(heads)
