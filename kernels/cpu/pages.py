"""Memory for packed weights: streaming a weight in 4 KiB pages spends time on address translation."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


def on_huge_pages(tensor: Tensor) -> Tensor:
    """The tensor, copied to 2 MiB pages where it fills several and the system (Linux) offers them."""
    if tensor.nbytes < 2 * _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel built without them
        return tensor
    placed = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)
