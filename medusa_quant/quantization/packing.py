"""Packing of int4 codes, two to a byte along K: the low nibble holds the even input feature."""

from __future__ import annotations

import torch
from torch import Tensor

OFFSET = 8  # offset-binary: nibble = signed code + 8


def pack_int4(codes: Tensor) -> Tensor:
    """Pack signed codes int8 [K, N] in [-8, 7] into uint8 [ceil(K/2), N]; an odd K is padded with code 0.

    Raises ValueError for codes outside the range.
    """
    if codes.numel() and (int(codes.min()) < -OFFSET or int(codes.max()) > 7):
        raise ValueError("int4 codes must lie in [-8, 7]")
    nibbles = (codes + OFFSET).to(torch.uint8)
    if nibbles.shape[0] % 2:
        nibbles = torch.cat([nibbles, nibbles.new_full((1, nibbles.shape[1]), OFFSET)])
    return nibbles[0::2] | (nibbles[1::2] << 4)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """Inverse of `pack_int4`: uint8 [ceil(K/2), N] -> signed int8 codes [K, N]."""
    rows, columns = packed.shape
    if rows != (in_features + 1) // 2:
        raise ValueError(f"packed rows {rows} do not hold {in_features} input features")
    nibbles = torch.empty((rows, 2, columns), dtype=torch.int8, device=packed.device)
    nibbles[:, 0] = (packed & 15).to(torch.int8)
    nibbles[:, 1] = (packed >> 4).to(torch.int8)
    return (nibbles.view(rows * 2, columns) - OFFSET)[:in_features]
