"""Files packed by the real auto-gptq 0.7.1 (see tests/interop), and what it says they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import RunCli
from safetensors.torch import load_file

from medusa_quant import QuantizedWeight, load_heads
from medusa_quant.quantization.gptq_format import to_gptq

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-act-order", "int8-g32", "int8-g32-act-order"])
def test_what_auto_gptq_packed(name: str, tmp_path: Path, run: RunCli) -> None:
    folder = GOLDEN / name
    expected = load_file(folder / "expected" / "values.safetensors")["values"]
    lm_head = load_heads(folder).lm_head(0)
    assert lm_head is not None
    weight = lm_head.load()
    assert isinstance(weight, QuantizedWeight)
    assert (weight.g_idx is not None) == name.endswith("act-order")
    assert torch.allclose(weight.dequantize().t(), expected, atol=1e-6)
    packed = load_file(folder / "model.safetensors")
    for part, value in to_gptq(weight).items():
        assert torch.equal(value, packed[f"0.1.{part}"]), part
    dtype = name.split("-")[0]
    for tp, split in ((2, "vocab"), (2, "hidden")):
        out = tmp_path / f"{tp}{split}"
        result = run("convert", folder, "--dtype", dtype, "--tp", tp, "--lm-head-split", split, "--out", out)
        assert result.code == 0, result.err
        converted = load_heads(out).lm_head(0)
        assert converted is not None
        assert torch.equal(converted.dense(), lm_head.dense())
