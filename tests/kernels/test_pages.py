"""Weights on huge pages are the same weights."""

from __future__ import annotations

import mmap

import pytest
import torch

from medusa_quant.kernels.cpu.pages import on_huge_pages


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_values_and_shape_stay(dtype: torch.dtype) -> None:
    source = torch.randint(0, 200, (3, 1000, 3000), dtype=torch.uint8).to(dtype)
    placed = on_huge_pages(source)
    assert torch.equal(placed, source)
    assert placed.dtype == dtype
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert placed.data_ptr() != source.data_ptr()


def test_small_tensors_and_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small = torch.ones(100)
    assert on_huge_pages(small) is small
    large = torch.ones(3 << 20)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert on_huge_pages(large) is large
