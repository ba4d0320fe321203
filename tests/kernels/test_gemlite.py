"""What GemLite is given means our weight; GemLite needs a GPU, so a layer with its contract stands in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from kernel_cases import make_weight, oracle, relative
from torch import Tensor

from medusa_quant.kernels import gemlite
from medusa_quant.quantization import QuantizedWeight


class A16Wn:
    """HQQ's rule, which gemlite.helper.A16Wn follows: (codes - zeros) * scales, group by group along K."""

    def __init__(self, device: str) -> None:
        assert device == "cpu"

    def from_weights(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_size: int, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        assert codes.dtype == torch.uint8
        assert int(codes.max()) < 1 << bits
        values = (codes.reshape(-1, group_size).double() - zeros.double()) * scales.double()
        dense = values.reshape(codes.shape)
        return lambda x: x.double() @ dense.t()


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 128), ("int8", -1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_layer_multiplies_by_our_weight(
    kind: str, group: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = ModuleType("gemlite.helper")
    helper.A16Wn = A16Wn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gemlite", ModuleType("gemlite"))
    monkeypatch.setitem(sys.modules, "gemlite.helper", helper)
    weight = make_weight(kind, 256, 40, group, symmetric)
    assert isinstance(weight, QuantizedWeight)
    layer = gemlite.GemliteWeight(weight, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert relative(layer.run(x), oracle(x, weight)) < 1e-6


def test_only_on_a_gpu_where_installed() -> None:
    weight = make_weight("int4", 256, 40, 128)
    assert isinstance(weight, QuantizedWeight)
    assert not gemlite.takes(weight, torch.device("cpu"))
