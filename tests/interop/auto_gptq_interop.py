"""Interoperability with the real auto-gptq, run by `make interop` in an environment where it imports.

Its QuantLinear loads what we export and gives our outputs; we read what it packs, code for code; and its
packed files, kept small in tests/interop/golden, are what tests/conversion/test_auto_gptq_golden.py reads.

    python tests/interop/auto_gptq_interop.py [--write-golden]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa_quant import ConvertOptions, convert, load_heads
from medusa_quant.quantization import QuantizedWeight

GOLDEN = Path(__file__).parent / "golden"
HIDDEN, VOCAB, GROUP = 64, 96, 32


def heads(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator).half() * 0.1
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN, generator=generator).half()
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator).half() * 0.1
    return tensors


def quant_linear(
    bits: int, group_size: int, outputs: int, bias: bool, dtype: torch.dtype = torch.float32
) -> QuantLinear:
    return QuantLinear(bits, group_size, HIDDEN, outputs, bias, weight_dtype=dtype)


def check_ours_in_theirs(bits: int, group_size: int, symmetric: bool) -> float:
    """Largest relative difference between their forward pass on our file and ours."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(heads(bits), folder / "heads.safetensors")
        options = ConvertOptions(
            dtype=f"int{bits}", group_size=group_size, symmetric=symmetric, layout="gptq"
        )
        convert(folder / "heads.safetensors", folder / "gptq", options)
        stored = load_file(folder / "gptq" / "model.safetensors")
        config = json.loads((folder / "gptq" / "quantize_config.json").read_text())
        assert (config["bits"], config["group_size"], config["sym"]) == (bits, group_size, symmetric)
        ours = load_heads(folder / "gptq")
        x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
        for tensor in ours:
            if not tensor.quantized:
                continue
            prefix = tensor.key.removesuffix(".qweight")
            layer = quant_linear(bits, group_size, tensor.shape[0], f"{prefix}.bias" in stored)
            state = {
                key.removeprefix(prefix + "."): value
                for key, value in stored.items()
                if key.startswith(prefix + ".")
            }
            missing = layer.load_state_dict(state, strict=True)
            assert not missing.missing_keys
            theirs = layer(x).float()
            expected = x @ tensor.dense().t().float() + state.get("bias", torch.zeros(())).float()
            worst = max(worst, float((theirs - expected).norm() / expected.norm()))
    return worst


def pack_theirs(bits: int, group_size: int, act_order: bool, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """A linear layer packed by auto-gptq: its state dict, and the values [N, K] it stands for."""
    generator = torch.Generator().manual_seed(seed)
    groups = HIDDEN // group_size
    half = 2**bits
    codes = torch.randint(0, half, (VOCAB, HIDDEN), generator=generator)
    scales = (torch.rand(VOCAB, groups, generator=generator) * 0.02 + 0.01).half().float()
    zeros = torch.randint(1, half, (VOCAB, groups), generator=generator).float()
    g_idx = torch.arange(HIDDEN) // group_size
    if act_order:
        g_idx = g_idx[torch.randperm(HIDDEN, generator=generator)]
    values = (codes - zeros[:, g_idx]) * scales[:, g_idx]
    linear = nn.Linear(HIDDEN, VOCAB, bias=False).half()
    linear.weight.data = values.half()
    layer = quant_linear(bits, group_size, VOCAB, False, torch.float16)
    layer.pack(linear, scales, zeros, g_idx.int())
    return dict(layer.state_dict()), values


def check_theirs_in_ours(bits: int, group_size: int, act_order: bool, write: bool) -> None:
    state, values = pack_theirs(bits, group_size, act_order, bits)
    tensors = {f"0.1.{key}": value for key, value in state.items()}
    generator = torch.Generator().manual_seed(7)
    tensors["0.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator).half()
    config = {
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": False,
        "quant_method": "gptq",
    }
    name = f"int{bits}-g{group_size}{'-act-order' if act_order else ''}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = GOLDEN / name if write else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "quantize_config.json").write_text(json.dumps(config) + "\n")
        if write:
            (folder / "expected").mkdir(exist_ok=True)
            save_file({"values": values}, folder / "expected" / "values.safetensors")
        lm_head = load_heads(folder / "model.safetensors").lm_head(0)
        assert lm_head is not None
        weight = lm_head.load()
        assert isinstance(weight, QuantizedWeight)
        assert (weight.g_idx is not None) == act_order
        assert torch.allclose(weight.dequantize().t(), values, atol=1e-6), name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write-golden", action="store_true")
    write = parser.parse_args().write_golden
    checks = 0
    for bits in (4, 8):
        for group_size in (GROUP, -1):
            for symmetric in (True, False):
                difference = check_ours_in_theirs(bits, group_size, symmetric)
                form = f"int{bits} g {group_size} {'sym' if symmetric else 'asym'}"
                print(f"auto-gptq runs our {form}: relative difference {difference:.1e}")
                assert difference < 1e-3
                checks += 1
        for act_order in (False, True):
            check_theirs_in_ours(bits, GROUP, act_order, write)
            print(f"we read auto-gptq's int{bits} g {GROUP}{' act-order' if act_order else ''}: same values")
            checks += 1
    print(f"{checks} passed, 0 failed")


if __name__ == "__main__":
    main()
