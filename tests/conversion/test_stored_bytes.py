"""What lies on disk, to the byte: against the original converter's scheme, and against golden digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import RunCli
from made import heads_a, save

from medusa_quant import ConvertOptions, convert
from medusa_quant.workspace.stream import byte_blocks


def original_scheme(tensors: dict[str, np.ndarray], num_layers: int, tp: int) -> dict[str, bytes]:
    """TurboMind's Medusa converter, rewritten from the description of its files: ResBlocks split on the
    output, LM matrices on the input, everything (in, out) row-major fp16."""
    files = {}
    for key, value in tensors.items():
        head, layer, *rest = key.split(".")
        for rank in range(tp):
            if rest[-1] == "bias":
                name, part = f"{head}.{layer}.linear.{rank}.bias", np.split(value, tp)[rank]
            elif int(layer) < num_layers:
                name = f"{head}.{layer}.linear.{rank}.weight"
                part = np.split(value.T, tp, axis=1)[rank]
            else:
                name, part = f"{head}.{layer}.{rank}.weight", np.split(value.T, tp, axis=0)[rank]
            files[f"medusa.{name}"] = np.ascontiguousarray(part).astype("<f2").tobytes()
    return files


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_original_converters_scheme(num_layers: int, tp: int, run: RunCli, tmp_path: Path) -> None:
    tensors = heads_a(3, num_layers, hidden=64, vocab=101)
    source, out = save(tmp_path / "s", tensors), tmp_path / "out"
    command = ["convert", source, "--dtype", "fp16", "--lm-head-split", "hidden", "--tp", tp, "--out", out]
    assert run(*command).code == 0
    expected = original_scheme({key: value.numpy() for key, value in tensors.items()}, num_layers, tp)
    folder = out / "triton_models" / "weights"
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert found.keys() - {"manifest.json", "config.ini"} == expected.keys()
    for name, content in expected.items():
        assert found[name] == content, name


def golden_heads() -> dict[str, torch.Tensor]:
    """Values computed, not drawn: the digests below must not depend on a generator's version."""
    tensors = heads_a(1, 1, hidden=64, vocab=70)
    for number, (key, value) in enumerate(tensors.items()):
        index = torch.arange(value.numel(), dtype=torch.float64) + 7 * number
        tensors[key] = ((index * 37 % 101 - 50) / 64).to(torch.float16).view(value.shape)
    return tensors


GOLDEN = {
    "fp16": {
        "0.0.linear.0.bias": "510335a87cc54e6e",
        "0.0.linear.0.weight": "e2634dbb70cd0b51",
        "0.0.linear.1.bias": "77bae4a881a7240d",
        "0.0.linear.1.weight": "8265c2f8519a7011",
        "0.1.0.weight": "325c4624b96782b0",
        "0.1.1.weight": "c9c6f2ed06430598",
    },
    "bf16": {
        "0.0.linear.0.bias": "c034f536d94560f2",
        "0.0.linear.0.weight": "37c8780b0ce697e1",
        "0.0.linear.1.bias": "2106d02625cebc8b",
        "0.0.linear.1.weight": "557b50e4f778bcc3",
        "0.1.0.weight": "02418edb99374654",
        "0.1.1.weight": "e4353727455f8514",
    },
    "int8": {
        "0.0.linear.0.bias": "510335a87cc54e6e",
        "0.0.linear.0.qweight": "5b351fce3138966a",
        "0.0.linear.0.scales": "bbc23ed7ef243687",
        "0.0.linear.1.bias": "77bae4a881a7240d",
        "0.0.linear.1.qweight": "6c7c5701f6bea7c9",
        "0.0.linear.1.scales": "6063baf0396dc38f",
        "0.1.0.qweight": "1db4692ade1446a6",
        "0.1.0.scales": "5cba2e834bda9800",
        "0.1.1.qweight": "ebc244a55f67abac",
        "0.1.1.scales": "6758ac2bc2d784b1",
    },
    "int4": {
        "0.0.linear.0.bias": "510335a87cc54e6e",
        "0.0.linear.0.qweight": "f3e18f85a2f08f8c",
        "0.0.linear.0.scales": "efbd3dc50da1c93e",
        "0.0.linear.1.bias": "77bae4a881a7240d",
        "0.0.linear.1.qweight": "989be446e7050b56",
        "0.0.linear.1.scales": "6ed6411273ffe87d",
        "0.1.0.qweight": "d03512a240bc79fa",
        "0.1.0.scales": "19136aa4db2047fe",
        "0.1.1.qweight": "26a736919de243d9",
        "0.1.1.scales": "814a5c80c0618dfd",
    },
    "int4 asymmetric": {
        "0.0.linear.0.bias": "510335a87cc54e6e",
        "0.0.linear.0.qweight": "9ca0efe3c5684e78",
        "0.0.linear.0.scales": "a1c7ed9fac7c4a82",
        "0.0.linear.0.zeros": "be880213961b411a",
        "0.0.linear.1.bias": "77bae4a881a7240d",
        "0.0.linear.1.qweight": "1ebb0d70ac3d1401",
        "0.0.linear.1.scales": "8f956fefeb039fd5",
        "0.0.linear.1.zeros": "2e191ef70afcbfc4",
        "0.1.0.qweight": "293fd63bdc54b03f",
        "0.1.0.scales": "a3b10ef4cabc6ee1",
        "0.1.0.zeros": "b435e4bb325417c7",
        "0.1.1.qweight": "0cfc23d13ad09231",
        "0.1.1.scales": "0f421c60ce830b01",
        "0.1.1.zeros": "f7c320175fc0bae2",
    },
}


def digests(out: Path) -> dict[str, str]:
    return {
        file.name.removeprefix("medusa."): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in sorted((out / "triton_models" / "weights").iterdir())
        if file.name.startswith("medusa.")
    }


@pytest.mark.parametrize("form", list(GOLDEN))
def test_golden_files(form: str, tmp_path: Path) -> None:
    dtype, _, variant = form.partition(" ")
    options = ConvertOptions(
        dtype=dtype, group_size=32 if dtype == "int4" else None, symmetric=not variant, tp=2
    )
    convert(save(tmp_path / "s", golden_heads()), tmp_path / "out", options)
    assert digests(tmp_path / "out") == GOLDEN[form]


def test_int4_bytes_by_hand(tmp_path: Path) -> None:
    """The first codes of a matrix, worked out on paper: w = 7 * s at most, low nibble is the even input."""
    tensors = heads_a(1, hidden=32, vocab=64)
    weight = torch.zeros(32, 32, dtype=torch.float16)
    weight[0, :4] = torch.tensor([7.0, -7.0, 1.0, -3.0])  # output 0: scale 1
    weight[1, :2] = torch.tensor([3.5, 0.5])  # output 1: scale 0.5
    tensors["0.0.linear.weight"] = weight
    convert(save(tmp_path / "s", tensors), tmp_path / "out", ConvertOptions(dtype="int4", group_size=32))
    folder = tmp_path / "out" / "triton_models" / "weights"
    codes = np.fromfile(folder / "medusa.0.0.linear.0.qweight", np.uint8).reshape(16, 32)
    assert codes[0, :3].tolist() == [(15) | (1 << 4), (15) | (9 << 4), 0x88]
    assert codes[1, :2].tolist() == [9 | (5 << 4), 0x88]
    scales = np.fromfile(folder / "medusa.0.0.linear.0.scales", "<f2").reshape(1, 32)
    assert scales[0, :3].tolist() == [1.0, 0.5, 1.0]


def test_asymmetric_stores_zeros(tmp_path: Path) -> None:
    source = save(tmp_path / "s", heads_a(hidden=64))
    convert(source, tmp_path / "out", ConvertOptions(dtype="int4", group_size=32, symmetric=False))
    folder = tmp_path / "out" / "triton_models" / "weights"
    assert (folder / "medusa.0.0.linear.0.zeros").stat().st_size == 2 * 64
    assert not (folder / "medusa.0.0.linear.0.weight").exists()


def test_config_ini_keeps_other_keys(run: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "triton_models" / "weights"
    folder.mkdir(parents=True)
    (folder / "config.ini").write_text("[llama]\nHead_Num = 32\nmedusa_num_heads = 9\n[other]\na = %(b)s\n")
    (folder / "layers.0.attention.w_qkv.0.weight").write_bytes(b"base")
    inode = (folder / "layers.0.attention.w_qkv.0.weight").stat().st_ino
    source = save(tmp_path / "s", heads_a(2))
    assert run("convert", source, "--dtype", "int4", "--out", tmp_path / "out").code == 2
    result = run("convert", source, "--dtype", "int4", "--out", tmp_path / "out", "--force")
    assert result.code == 0, result.err
    text = (folder / "config.ini").read_text()
    for line in ("Head_Num = 32", "medusa_num_heads = 2", "medusa_num_layers = 1", "a = %(b)s"):
        assert line in text
    for line in ("medusa_weight_type = int4", "medusa_group_size = 128"):
        assert line in text
    base = folder / "layers.0.attention.w_qkv.0.weight"
    assert (base.read_bytes(), base.stat().st_ino) == (b"base", inode)


def test_the_manifest_tells_everything(tmp_path: Path) -> None:
    source = save(tmp_path / "s", heads_a(2, 2, hidden=64, vocab=100))
    convert(source, tmp_path / "out", ConvertOptions(dtype="int4", group_size=32, tp=2))
    folder = tmp_path / "out" / "triton_models" / "weights"
    manifest = json.loads((folder / "manifest.json").read_text())
    for key, value in {
        "format_version": 1,
        "hidden_size": 64,
        "vocab_size": 100,
        "padded_vocab_size": 128,
        "num_heads": 2,
        "num_layers": 2,
        "tp": 2,
        "lm_head_split": "vocab",
        "weight_type": "int4",
        "group_size": 32,
    }.items():
        assert manifest[key] == value
    content = (source / "medusa_lm_head.safetensors").read_bytes()
    assert manifest["source"]["files"] == [
        {
            "name": "medusa_lm_head.safetensors",
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    ]
    assert {entry["file"] for entry in manifest["files"]} | {"manifest.json", "config.ini"} == {
        file.name for file in folder.iterdir()
    }
    for entry in manifest["files"]:
        stored = (folder / entry["file"]).read_bytes()
        assert entry["bytes"] == len(stored)
        assert entry["sha256"] == hashlib.sha256(stored).hexdigest()
        assert entry["split"] == "output"
        assert entry["method"] == ("copy" if entry["role"] == "resblock.bias" else "rtn")
    errors = [entry["error"]["relative"] for entry in manifest["files"] if entry["part"] == "qweight"]
    assert all(0.01 < error < 0.2 for error in errors)


def test_a_single_column_is_written() -> None:
    """V 1, transposed: [8, 1] with strides (1, 8), which torch calls contiguous."""
    column = torch.arange(8, dtype=torch.float32).view(1, 8).t()
    for dtype in (torch.float32, torch.float16):
        stored = b"".join(bytes(block) for block in byte_blocks(column, dtype))
        assert stored == column.to(dtype).contiguous().view(-1).numpy().tobytes()
