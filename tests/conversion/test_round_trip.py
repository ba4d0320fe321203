"""Write -> read -> merge gives back the quantized values exactly, whatever the shape, split and layout."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from made import heads_a, save

from medusa_quant import (
    ConvertOptions,
    InputError,
    MedusaHeads,
    QuantizedWeight,
    Workspace,
    convert,
    load_heads,
)
from medusa_quant.plan import make_plan
from medusa_quant.quantization import Scheme, quantize_weight
from medusa_quant.verification import verify


def assert_equal(found: MedusaHeads, expected: MedusaHeads) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for tensor_id, tensor in expected.tensors.items():
        first, second = found.tensors[tensor_id].load(), tensor.load()
        if isinstance(second, QuantizedWeight):
            assert isinstance(first, QuantizedWeight)
            assert (first.shape, first.bits, first.group_size) == (
                second.shape,
                second.bits,
                second.group_size,
            )
            assert first.tensors().keys() == second.tensors().keys()
            for name, part in second.tensors().items():
                assert torch.equal(first.tensors()[name], part), (tensor_id, name)
        else:
            assert torch.equal(first, second), tensor_id


@st.composite
def conversions(draw: st.DrawFn) -> tuple[dict[str, int], ConvertOptions]:
    tp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    hidden = tp * draw(st.sampled_from([8, 24, 32, 33, 64, 72]))
    shape = {
        "num_heads": draw(st.integers(1, 3)),
        "num_layers": draw(st.integers(1, 2)),
        "hidden": hidden,
        "vocab": draw(st.sampled_from([1, 5, 63, 64, 65, 130, 517])),
    }
    dtype = draw(st.sampled_from(["fp32", "fp16", "bf16", "int8", "int4"]))
    integer = dtype.startswith("int")
    options = ConvertOptions(
        dtype=dtype,
        group_size=draw(st.sampled_from([None, -1, 32, 64, 128])) if integer else None,
        symmetric=draw(st.booleans()),
        tp=tp,
        lm_head_split=draw(st.sampled_from(["vocab", "hidden"])),
        layout=draw(st.sampled_from(["turbomind", "safetensors"])),
    )
    return shape, options


# A last group of one column: its scale is the value over the largest code, which fp16 cannot always hold.
_ONE_COLUMN_GROUP = (
    {"num_heads": 1, "num_layers": 1, "hidden": 33, "vocab": 1},
    ConvertOptions(dtype="int8", group_size=32, symmetric=False),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversions(), st.integers(0, 5))
@example(_ONE_COLUMN_GROUP, 0)
def test_write_read_merge(case: tuple[dict[str, int], ConvertOptions], seed: int) -> None:
    shape, options = case
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = load_heads(save(folder / "source", heads_a(**shape, seed=seed, dtype=torch.float32)))
        try:
            make_plan(source, options)
        except InputError:
            # A split that cuts a group; which ones do is tested with the other bad input.
            assume(False)
        result = convert(source, folder / "out", options)
        entries = result.manifest.files
        # The plan is made before values are read and counts fp16 scales; fp32 ones are twice that.
        widened = [entry for entry in entries if entry.part == "scales" and entry.dtype == "fp32"]
        assert sum(entry.bytes for entry in entries) == result.plan.bytes + sum(e.bytes for e in widened) // 2
        read = load_heads(folder / "out")
        for tensor_id, tensor in source.tensors.items():
            value, found = tensor.load(), read.tensors[tensor_id].load()
            assert isinstance(value, torch.Tensor)
            if options.dtype in ("int8", "int4") and tensor_id.role != "resblock.bias":
                assert isinstance(found, QuantizedWeight)
                scheme = Scheme.for_dtype(options.dtype, options.group_size, options.symmetric)
                expected, _ = quantize_weight(value, scheme)
                for part, stored in expected.tensors().items():
                    assert torch.equal(found.tensors()[part], stored)
            else:
                assert isinstance(found, torch.Tensor)
                assert torch.equal(found, value.to(found.dtype))
        assert verify(folder / "out", folder / "source").ok
        # To other ranks and another layout and back: the same values, bit for bit.
        convert(read, folder / "one", ConvertOptions(layout="safetensors"))
        convert(
            folder / "one",
            folder / "back",
            ConvertOptions(tp=options.tp, lm_head_split=options.lm_head_split),
        )
        assert_equal(load_heads(folder / "one"), read)
        assert_equal(load_heads(folder / "back"), read)


@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("split", ["vocab", "hidden"])
def test_a_rank_is_a_slice_of_the_whole(dtype: str, split: str, tmp_path: Path) -> None:
    """Rank files hold what slicing the unsharded quantized matrix gives; vocabulary padding repeats row 0."""
    source = save(tmp_path / "s", heads_a(2, 2, hidden=128, vocab=150))
    convert(
        source, tmp_path / "whole", ConvertOptions(dtype=dtype, group_size=32 if dtype == "int4" else None)
    )
    convert(
        source,
        tmp_path / "parts",
        ConvertOptions(dtype=dtype, group_size=32 if dtype == "int4" else None, tp=2, lm_head_split=split),
    )
    whole, parts = Workspace.open(tmp_path / "whole"), Workspace.open(tmp_path / "parts")
    for tensor_id in whole.tensor_ids:
        full = whole.load(tensor_id)
        for rank in range(2):
            shard, part = parts.shard(tensor_id, rank), parts.load_rank(tensor_id, rank)
            assert (shard.axis == "input") == (split == "hidden" and tensor_id.role == "lm_head.weight")
            dense = (
                full.dequantize()
                if isinstance(full, QuantizedWeight)
                else full.t()
                if full.ndim == 2
                else full
            )
            stored = part.dequantize() if isinstance(part, QuantizedWeight) else part
            real = min(shard.stop, shard.size)
            if shard.axis == "input":
                assert torch.equal(stored, dense[shard.start : real])
            else:
                assert torch.equal(stored[..., : real - shard.start], dense[..., shard.start : real])
                padding = stored[..., real - shard.start :]
                assert torch.equal(padding, dense[..., :1].expand_as(padding))


def test_tp_3_pads_the_vocabulary(tmp_path: Path) -> None:
    source = save(tmp_path / "s", heads_a(1, hidden=96, vocab=517))
    result = convert(source, tmp_path / "out", ConvertOptions(dtype="fp16", tp=3))
    assert (result.manifest.vocab_size, result.manifest.padded_vocab_size) == (517, 576)
    lm_head = load_heads(tmp_path / "out").lm_head(0)
    assert lm_head is not None
    assert lm_head.shape == (517, 96)


@pytest.mark.parametrize("layout", ["hf", "vllm", "gptq"])
def test_whole_matrix_layouts_read_back(layout: str, tmp_path: Path) -> None:
    source = load_heads(save(tmp_path / "s", heads_a(2, 2, vocab=96)))
    dtype = "int4" if layout == "gptq" else "fp16"
    options = ConvertOptions(dtype=dtype, group_size=32 if layout == "gptq" else None, layout=layout)
    convert(source, tmp_path / "out", options)
    read = load_heads(tmp_path / "out")
    if layout == "gptq":
        convert(source, tmp_path / "codes", replace(options, layout="turbomind"))
        assert_equal(read, load_heads(tmp_path / "codes"))
    else:
        assert_equal(read, source)


def test_dequantized_layouts_hold_the_codes_values(tmp_path: Path) -> None:
    convert(save(tmp_path / "s", heads_a()), tmp_path / "int4", ConvertOptions(dtype="int4"))
    quantized = load_heads(tmp_path / "int4")
    for layout in ("hf", "vllm"):
        convert(tmp_path / "int4", tmp_path / layout, ConvertOptions(layout=layout))
        for tensor_id, tensor in load_heads(tmp_path / layout).tensors.items():
            assert torch.equal(tensor.dense(), quantized.tensors[tensor_id].dense().to(torch.float16))
