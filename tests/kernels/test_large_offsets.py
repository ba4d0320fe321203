"""Weights of more than 2^31 bytes: the CPU kernel's offsets, on pages that are never written."""

import mmap

import pytest
import torch
from kernel_cases import make_weight, oracle, poisoned, relative

from medusa_quant.kernels import dispatch
from medusa_quant.kernels.cpu.gemm import CpuWeight
from medusa_quant.kernels.cpu.packing import PANEL

FEATURES = 1 << 16


@pytest.mark.skipif(dispatch.unavailable("cpu") is not None, reason="no CPU kernels on this machine")
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
def test_the_last_panel_lies_beyond_two_to_the_31_bytes(kind):
    weight = make_weight(kind, FEATURES, PANEL)
    small, large = CpuWeight(weight), CpuWeight(weight)
    panel = small._packed.view(torch.uint8).flatten()
    panels = (1 << 31) // len(panel) + 2
    codes = torch.frombuffer(mmap.mmap(-1, panels * len(panel)), dtype=torch.uint8)
    codes[-len(panel) :] = panel
    if small.is_integer:
        scales = small._scales.new_zeros(panels, *small._scales.shape[1:])
        scales[-1] = small._scales[0]
        large._struct.scales = scales.data_ptr()
    large.out_features = large._struct.out_features = panels * PANEL
    large._struct.codes = codes.data_ptr()
    x = torch.randn(1, FEATURES)
    found = large.run(x, out=poisoned(1, panels * PANEL))
    assert torch.equal(found[:, -PANEL:], small.run(x))
    assert relative(found[:, -PANEL:], oracle(x, weight)) < 1e-3
    assert torch.count_nonzero(found[:, :-PANEL]) == 0
