"""Heads that bitsandbytes quantized: the same values as it gives, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import RunCli
from made import Tensors, heads_a, save

from medusa_quant import QuantizedWeight, load_heads

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def quantized(kind: str, nested: bool = False) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """(state dict with bitsandbytes' tensors, values by key of the matrix)."""
    stored: Tensors = {}
    values: Tensors = {}
    for key, tensor in heads_a(2, hidden=64, vocab=96).items():
        if key.endswith("bias"):
            stored[key] = tensor
            continue
        prefix = key.removesuffix(".weight")
        if kind == "int8":
            codes, scale, _ = bnb.functional.int8_vectorwise_quant(tensor)
            stored |= {f"{prefix}.weight": codes, f"{prefix}.SCB": scale}
            stored[f"{prefix}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
            values[key] = codes.float() * scale.float().unsqueeze(1) / 127
        else:
            packed, state = bnb.functional.quantize_4bit(tensor, quant_type=kind, compress_statistics=nested)
            stored[f"{prefix}.weight"] = packed
            parts = state.as_dict(packed=True)
            stored |= {f"{prefix}.weight.{name}": value for name, value in parts.items()}
            values[key] = bnb.functional.dequantize_4bit(packed, state)
    return stored, values


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("int8", False)])
def test_values(kind: str, nested: bool, tmp_path: Path, run: RunCli) -> None:
    stored, values = quantized(kind, nested)
    source = save(tmp_path / "s", stored)
    heads = load_heads(source)
    for head in range(2):
        lm_head = heads.lm_head(head)
        assert lm_head is not None
        for tensor, key in (
            (heads.resblock_weight(head, 0), f"{head}.0.linear.weight"),
            (lm_head, f"{head}.1.weight"),
        ):
            assert torch.allclose(tensor.dense().float(), values[key].float(), rtol=2e-3, atol=1e-5)
            assert isinstance(tensor.load(), QuantizedWeight) == (kind == "int8")
    dtype = "int8" if kind == "int8" else "int4"
    result = run("convert", source, "--dtype", dtype, "--tp", "2", "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert run("verify", tmp_path / "out", "--against", source).code == 0
    if kind == "int8":
        first, second = load_heads(tmp_path / "out").lm_head(0), heads.lm_head(0)
        assert first is not None
        assert second is not None
        assert torch.equal(first.load().qweight, second.load().qweight)  # type: ignore[union-attr]


@pytest.mark.parametrize("missing", ["0.1.weight.absmax", "0.1.weight.quant_map", "0.1.weight"])
def test_missing_parts(missing: str, tmp_path: Path, run: RunCli) -> None:
    stored, _ = quantized("nf4")
    del stored[missing]
    result = run("convert", save(tmp_path / "s", stored), "--dtype", "fp16", "--out", tmp_path / "out")
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 1
    assert "bitsandbytes" in result.err
