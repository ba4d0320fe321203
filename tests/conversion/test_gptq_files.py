"""AutoGPTQ's packing: against its own formula in numpy, both checkpoint formats, act-order, any tp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import RunCli
from hypothesis import given, settings
from hypothesis import strategies as st
from made import heads_a, save
from safetensors.torch import load_file

from medusa_quant import QuantizedWeight, load_heads
from medusa_quant.quantization.gptq_format import from_gptq, to_gptq


def random_quantized(
    features: int,
    outputs: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    seed: int = 0,
    act_order: bool = False,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (bits - 1)
    groups = 1 if group_size == -1 else -(-features // group_size)
    codes = torch.randint(-half, half, (features, outputs), dtype=torch.int8, generator=generator)
    scales = (torch.rand(groups, outputs, generator=generator) + 0.1).half()
    zeros = None
    if not symmetric:
        zeros = torch.randint(1 - half, half, (groups, outputs), dtype=torch.int8, generator=generator)
    g_idx = None
    if act_order:
        order = torch.randperm(features, generator=generator)
        g_idx = (torch.arange(features) // group_size)[order].int()
    return QuantizedWeight.from_codes(codes, scales, bits, group_size, zeros, g_idx)


def assert_equal(first: QuantizedWeight, second: QuantizedWeight) -> None:
    assert (first.shape, first.bits, first.group_size) == (second.shape, second.bits, second.group_size)
    assert first.tensors().keys() == second.tensors().keys()
    for name, part in first.tensors().items():
        assert torch.equal(part, second.tensors()[name]), name


def unpack_as_auto_gptq(stored: dict[str, torch.Tensor], bits: int, version: str) -> np.ndarray:
    """Its dequantization, [K, N]: words hold 32 / bits unsigned codes, lowest first; v1 stores zero - 1."""
    mask, shifts = 2**bits - 1, np.arange(0, 32, bits, dtype=np.uint32)
    words = stored["qweight"].numpy().view(np.uint32)
    codes = ((words[:, None, :] >> shifts[None, :, None]) & mask).reshape(-1, words.shape[1]).astype(np.int64)
    words = stored["qzeros"].numpy().view(np.uint32)
    zeros = ((words[:, :, None] >> shifts[None, None, :]) & mask).reshape(words.shape[0], -1).astype(np.int64)
    zeros = (zeros + (version == "gptq")) & (mask if version == "gptq_v2" else 2 * mask + 1)
    group = stored["g_idx"].numpy()
    return (codes - zeros[group]) * stored["scales"].float().numpy()[group]


@settings(max_examples=60, deadline=None)
@given(
    features=st.sampled_from([32, 64, 96, 160, 576]),
    outputs=st.sampled_from([32, 64, 96]),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([-1, 32, 64, 128]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    version=st.sampled_from(["gptq", "gptq_v2"]),
    seed=st.integers(0, 20),
)
def test_to_and_from_auto_gptq(
    features: int,
    outputs: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    act_order: bool,
    version: str,
    seed: int,
) -> None:
    act_order = act_order and group_size != -1 and group_size < features
    weight = random_quantized(features, outputs, bits, group_size, symmetric, seed, act_order)
    stored = to_gptq(weight, version)
    assert stored["qweight"].shape == (features * bits // 32, outputs)
    assert stored["qzeros"].shape == (weight.scales.shape[0], outputs * bits // 32)
    expected = weight.dequantize().numpy()
    assert np.array_equal(unpack_as_auto_gptq(stored, bits, version).astype(np.float32), expected)
    back = from_gptq(
        stored["qweight"], stored["qzeros"], stored["scales"], stored["g_idx"], bits, group_size, version
    )
    assert_equal(back, weight)


def test_v1_refuses_a_zero_point_it_cannot_store() -> None:
    weight = random_quantized(32, 32, 4, 32, symmetric=False)
    assert weight.zeros is not None
    weight.zeros[0, 0] = -8
    with pytest.raises(ValueError, match="gptq_v2"):
        to_gptq(weight, "gptq")
    assert_equal(from_gptq(*to_gptq(weight, "gptq_v2").values(), 4, 32, "gptq_v2"), weight)


def save_gptq(folder: Path, version: str, act_order: bool, config: bool, symmetric: bool = True) -> Path:
    """A checkpoint of two heads as AutoGPTQ or GPTQModel writes it."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for head in range(2):
        for key, outputs in ((f"{head}.0.linear", 64), (f"{head}.1", 96)):
            weight = random_quantized(64, outputs, 4, 32, symmetric, head, act_order)
            tensors |= {f"{key}.{part}": value for part, value in to_gptq(weight, version).items()}
        tensors[f"{head}.0.linear.bias"] = torch.full((64,), float(head), dtype=torch.float16)
    save(folder, tensors)
    (folder / "medusa_lm_head.safetensors").rename(folder / "model.safetensors")
    content = {"bits": 4, "group_size": 32, "desc_act": act_order, "sym": symmetric, "quant_method": "gptq"}
    if version != "gptq":
        content["checkpoint_format"] = version
    name = "quantize_config.json" if config else "config.json"
    (folder / name).write_text(json.dumps(content if config else {"quantization_config": content}))
    return folder


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("config", [True, False])
def test_reading_and_any_tp(version: str, act_order: bool, config: bool, tmp_path: Path, run: RunCli) -> None:
    source = save_gptq(tmp_path / "gptq", version, act_order, config)
    original = load_heads(source)
    for tp, split in ((1, "vocab"), (2, "vocab"), (2, "hidden"), (4, "vocab")):
        out = tmp_path / f"tp{tp}{split}"
        result = run("convert", source, "--dtype", "int4", "--tp", tp, "--lm-head-split", split, "--out", out)
        assert result.code == 0, result.err
        for tensor_id, tensor in load_heads(out).tensors.items():
            first, second = tensor.load(), original.tensors[tensor_id].load()
            if isinstance(second, QuantizedWeight):
                assert isinstance(first, QuantizedWeight)
                assert_equal(first, second)
        assert run("verify", out, "--against", source).code == 0
    assert (original.lm_head(0).load().g_idx is not None) == act_order  # type: ignore[union-attr]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_export_gives_the_source_back(symmetric: bool, act_order: bool, tmp_path: Path, run: RunCli) -> None:
    source = save_gptq(tmp_path / "gptq", "gptq_v2", act_order, True, symmetric)
    assert run("convert", source, "--dtype", "int4", "--tp", "2", "--out", tmp_path / "ranks").code == 0
    result = run(
        *(
            "export",
            tmp_path / "ranks",
            "--layout",
            "gptq",
            "--gptq-format",
            "gptq_v2",
            "--out",
            tmp_path / "back",
        )
    )
    assert result.code == 0, result.err
    first, second = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    written = json.loads((tmp_path / "back" / "quantize_config.json").read_text())
    assert (written["desc_act"], written["sym"]) == (act_order, symmetric)
    assert (written["bits"], written["group_size"], written["checkpoint_format"]) == (4, 32, "gptq_v2")


def test_what_the_format_cannot_hold(tmp_path: Path, run: RunCli) -> None:
    source = save(tmp_path / "s", heads_a(vocab=97))
    result = run("convert", source, "--dtype", "int4", "--layout", "gptq", "--out", tmp_path / "out")
    assert result.code == 2
    assert "multiples of 32" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["g_idx", "qzeros", "no scales", "format"])
def test_damaged_gptq_checkpoints(broken: str, tmp_path: Path, run: RunCli) -> None:
    source = save_gptq(tmp_path / "gptq", "gptq", False, True)
    tensors = load_file(source / "model.safetensors")
    if broken == "g_idx":
        tensors["0.1.g_idx"] = tensors["0.1.g_idx"] + 1
    elif broken == "qzeros":
        tensors["0.1.qzeros"] = tensors["0.1.qzeros"][:, :-1].contiguous()
    elif broken == "no scales":
        del tensors["0.1.scales"]
    else:
        (source / "quantize_config.json").write_text(json.dumps({"checkpoint_format": "marlin"}))
    save(source, tensors)
    (source / "medusa_lm_head.safetensors").rename(source / "model.safetensors")
    result = run("convert", source, "--dtype", "int4", "--out", tmp_path / "out")
    assert result.code == 2, result
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
