"""Tensors to bytes and back: row-major, little-endian, a few MB at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError

_BLOCK_BYTES = 8 << 20
# A transposed copy in tiles this small stays in the cache, and on one thread: the other hashes and writes.
_TILE_ROWS, _TILE_COLUMNS = 256, 128

STORED_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
}
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def stored_dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def byte_blocks(tensor: Tensor, dtype: torch.dtype, clip: bool = False) -> Iterator[memoryview]:
    """The row-major bytes of a tensor of any strides, cast to `dtype` block by block.

    clip: saturate finite values at the range of `dtype` instead of overflowing to Inf.
    """
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor
    row_bytes = matrix.shape[1] * dtype.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, matrix.shape[0], step):
        block = _contiguous(matrix[start : start + step], dtype, clip)
        # Flat first: a single column counts as contiguous with a stride that its bytes cannot be viewed by.
        yield block.reshape(-1).view(torch.uint8).numpy().data


def saturate(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a float dtype, finite values beyond its range to the largest it holds; NaN and Inf stay."""
    limit = torch.finfo(dtype).max
    # bf16 would round fp16's 65504 up to a value that overflows.
    wide = block.to(torch.promote_types(block.dtype, torch.float32))
    return torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(dtype)


def _contiguous(block: Tensor, dtype: torch.dtype, clip: bool) -> Tensor:
    if clip and block.dtype != dtype and dtype.is_floating_point:
        block = saturate(block, dtype)
    if block.is_contiguous() and block.dtype == dtype:
        return block
    result = torch.empty(block.shape, dtype=dtype)
    for row in range(0, block.shape[0], _TILE_ROWS):
        for column in range(0, block.shape[1], _TILE_COLUMNS):
            tile = slice(row, row + _TILE_ROWS), slice(column, column + _TILE_COLUMNS)
            result[tile].copy_(block[tile])
    return result


def map_file(path: Path, dtype: str, shape: list[int]) -> Tensor:
    """A raw file as a read-only mapped tensor. Raises InputError if its size is not that of the shape."""
    if sys.byteorder != "little":
        raise InputError("rank files are little-endian; this machine is not", file=path)
    torch_dtype = STORED_DTYPES[dtype]
    count = int(torch.Size(shape).numel())
    expected = count * torch_dtype.itemsize
    try:
        found = path.stat().st_size
    except OSError as error:
        raise InputError("missing file", file=path, fix="convert again") from error
    if found != expected:
        raise InputError(
            "wrong size", file=path, expected=f"{expected} bytes", found=f"{found} bytes", fix="convert again"
        )
    if count == 0:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.from_file(str(path), shared=False, size=count, dtype=torch_dtype).view(shape)
