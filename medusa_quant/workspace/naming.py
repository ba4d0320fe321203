"""File names of the workspace: the TurboMind converter's, with the rank always present."""

from __future__ import annotations

import re

from ..checkpoints.heads import LM_HEAD, TOKEN_MAP, TensorId

WEIGHTS_FOLDER = "triton_models/weights"
MANIFEST = "manifest.json"
CONFIG_INI = "config.ini"

# What the names below look like, to tell head files from a base model's in the same folder.
_HEAD_FILE = re.compile(
    r"medusa\.(\d+\.\d+\.linear\.\d+|\d+\.\d+\.\d+|token_map\.\d+)"
    r"\.(weight|bias|qweight|scales|zeros|g_idx|low_rank_[ab])"
)


def rank_name(tensor: TensorId, rank: int, part: str) -> str:
    """`medusa.{head}.{layer}.linear.{rank}.{part}` for ResBlocks, without `linear.` for LM matrices."""
    if tensor.role == TOKEN_MAP:
        return f"medusa.token_map.{rank}.{part}"
    middle = "" if tensor.role == LM_HEAD else "linear."
    return f"medusa.{tensor.head}.{tensor.layer}.{middle}{rank}.{part}"


def is_head_file(name: str) -> bool:
    """Whether a file of this name can only be one of ours (or of the original converter)."""
    return _HEAD_FILE.fullmatch(name) is not None
