"""Where a base model's tensors come from, under their Hugging Face names, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...checkpoints.source import open_source
from ...errors import InputError

# Derived buffers of old checkpoints, and the heads of a merged Medusa checkpoint.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^medusa_heads?\.")


@dataclass
class Weights:
    """Tensors by Hugging Face name. load reads one; `take` also checks its shape and marks it as used."""

    path: Path
    keys: set[str]
    load: Callable[[str], Tensor]

    def __post_init__(self) -> None:
        self._unused = {key for key in self.keys if not _IGNORED.search(key)}

    def take(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `key`, floating point of this shape. Raises InputError if missing or otherwise."""
        if key not in self.keys:
            raise InputError(
                "the base model lacks this tensor", file=self.path, key=key, expected=list(shape)
            )
        tensor = self.load(key)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise InputError(
                "not the shape or kind config.json calls for",
                file=self.path,
                key=key,
                expected=f"float {list(shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
        self._unused.discard(key)
        return tensor

    def take_optional(self, key: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.take(key, shape) if key in self.keys else None

    def check_all_used(self) -> None:
        """Raise InputError for a tensor the decoder has no place for: it would be dropped silently."""
        if self._unused:
            raise InputError(
                f"{len(self._unused)} tensor(s) this architecture has no place for",
                file=self.path,
                key=min(self._unused),
            )


def weights_from_folder(folder: Path) -> Weights:
    """Tensors of a Hugging Face folder (single file or sharded), memory-mapped."""
    source = open_source(folder)
    return Weights(folder, set(source.entries), lambda key: source.entries[key].load())
