"""Packing of int4 codes, two to a byte along K: the low nibble holds the even input feature."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

OFFSET = 8  # offset-binary: nibble = signed code + 8


def pack_int4(codes: Tensor) -> Tensor:
    """Pack signed codes int8 [K, N] in [-8, 7] into uint8 [ceil(K/2), N]; an odd K is padded with code 0.

    Raises ValueError for codes outside the range.
    """
    if codes.shape[0] % 2:
        codes = torch.cat([codes, codes.new_zeros((1, codes.shape[1]))])
    # Quantization works on [N, K]: its codes arrive as a transposed view, and are packed as they lie.
    transposed = codes.t().is_contiguous() and not codes.is_contiguous() and sys.byteorder == "little"
    stored = codes.t() if transposed else codes
    if stored.numel():
        low, high = stored.aminmax()
        if int(low) < -OFFSET or int(high) > 7:
            raise ValueError("int4 codes must lie in [-8, 7]")
    if transposed:
        return _pack_pairs(stored).t()
    nibbles = (codes + OFFSET).view(torch.uint8)
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _pack_pairs(codes: Tensor) -> Tensor:
    """[N, K] -> [N, K/2]: two codes are one int16 with the even one in its low byte, which is several times
    faster than picking every other byte."""
    pairs = (codes + OFFSET).reshape(-1).view(torch.int16)
    # The cast keeps the low byte.
    return (pairs | (pairs >> 4)).to(torch.uint8).view(codes.shape[0], -1)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """Inverse of `pack_int4`: uint8 [ceil(K/2), N] -> signed int8 codes [K, N]."""
    rows, columns = packed.shape
    if rows != (in_features + 1) // 2:
        raise ValueError(f"packed rows {rows} do not hold {in_features} input features")
    nibbles = torch.empty((rows, 2, columns), dtype=torch.int8, device=packed.device)
    nibbles[:, 0] = (packed & 15).to(torch.int8)
    nibbles[:, 1] = (packed >> 4).to(torch.int8)
    return (nibbles.view(rows * 2, columns) - OFFSET)[:in_features]
