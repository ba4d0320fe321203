"""Launch configurations: a table per architecture and bucket of M, instead of autotuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .weight import BLOCK_ROWS

# Streaming multiprocessors (compute units) of the data-centre part of each architecture.
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
# Shared memory a program may use, in bytes.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
BUCKETS = (16, 32, 64, 256)
MAX_TOP_K = 32
_SPLIT_TILE = 64
_MIN_PART_BLOCKS = 4
_MAX_SPLIT = 8


@dataclass(frozen=True)
class Config:
    """Tile of M and N, warps (wavefronts) and pipeline stages of one program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Chosen by compiling (no spills, within the shared memory); not yet tuned by timing on a device.
TABLE: dict[str, dict[int, Config]] = {
    "sm_80": {
        16: Config(16, 64, 4, 4),
        32: Config(32, 64, 4, 3),
        64: Config(64, 64, 4, 3),
        256: Config(64, 128, 8, 3),
    },
    "sm_90": {
        16: Config(16, 64, 4, 4),
        32: Config(32, 64, 4, 4),
        64: Config(64, 64, 4, 3),
        256: Config(64, 128, 8, 3),
    },
    "sm_100": {
        16: Config(16, 64, 4, 4),
        32: Config(32, 64, 4, 4),
        64: Config(64, 64, 4, 3),
        256: Config(64, 128, 8, 3),
    },
    "gfx942": {
        16: Config(16, 64, 4, 2),
        32: Config(32, 64, 4, 2),
        64: Config(64, 64, 4, 2),
        256: Config(64, 128, 8, 2),
    },
}


# fp32 activations multiply in scalar fp32: a small tile, or its operands spill.
FP32 = Config(16, 32, 4, 2)


def gemm_config(arch: str, rows: int, dtype: torch.dtype) -> Config:
    """The configuration for M = rows of x's dtype; above the last bucket, the last bucket's."""
    if dtype == torch.float32:
        return FP32
    bucket = next((bucket for bucket in BUCKETS if rows <= bucket), BUCKETS[-1])
    return TABLE[arch][bucket]


def split_k(arch: str, heads: int, outputs: int, features: int) -> int:
    """Parts along K: a power of two that gives each processor two programs, where K is long enough.

    Independent of M, so that a row is summed in the same parts whatever rows it is computed with.
    """
    blocks = -(-features // BLOCK_ROWS)
    programs = heads * -(-outputs // _SPLIT_TILE)
    parts = 1
    while (
        parts < _MAX_SPLIT
        and programs * parts < 2 * PROCESSORS[arch]
        and blocks >= 2 * parts * _MIN_PART_BLOCKS
    ):
        parts *= 2
    return parts


def architecture(device: torch.device) -> str:
    """The table's entry for a device; a part without one gets its nearest older relative's.

    The interpreter (any CPU tensor) uses sm_80's.
    """
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return "sm_80" if major < 9 else "sm_90" if major == 9 else "sm_100"
