"""Heads other tools quantized, judged and converted with calibration like our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import RunCli
from safetensors.torch import save_file

from medusa_quant.calibration import Statistics

HIDDEN, VOCAB, HELD = 64, 96, 200


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """fp16 heads whose guesses depend on the state."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = (torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.05).half()
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN).half()
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator).half()
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.fixture
def stats(source: Path, tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(600 + HELD, HIDDEN, generator=generator)
    seen, held = states[:600], states[600:]
    following = torch.randint(0, VOCAB, (HELD, 16), generator=generator, dtype=torch.int32)
    top = torch.zeros(HELD, 10)
    statistics = Statistics(
        (seen.t() @ seen).double(),
        seen.abs().amax(0),
        seen,
        held,
        following,
        top.int(),
        top,
        600,
        HELD,
        8,
        {"path": "synthetic", "hidden_size": HIDDEN, "vocab_size": VOCAB},
    )
    statistics.save(tmp_path / "stats.safetensors")
    return tmp_path / "stats.safetensors"


def _bitsandbytes(source: Path, out: Path, kind: str) -> Path:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from safetensors.torch import load_file

    stored = {}
    for key, tensor in load_file(source / "medusa_lm_head.safetensors").items():
        prefix = key.removesuffix(".weight")
        if key.endswith("bias"):
            stored[key] = tensor
        elif kind == "int8":
            codes, scale, _ = bnb.functional.int8_vectorwise_quant(tensor)
            stored |= {key: codes, f"{prefix}.SCB": scale}
            stored[f"{prefix}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        else:
            packed, state = bnb.functional.quantize_4bit(tensor, quant_type=kind)
            stored[key] = packed
            stored |= {f"{key}.{name}": value for name, value in state.as_dict(packed=True).items()}
    out.mkdir()
    save_file(stored, out / "medusa_lm_head.safetensors")
    return out


@pytest.mark.parametrize(("kind", "agreement"), [("gptq", 0.5), ("nf4", 0.5), ("int8", 0.9)])
def test_judged_and_converted(
    kind: str, agreement: float, run: RunCli, source: Path, stats: Path, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    if kind == "gptq":
        command = ["convert", source, "--dtype", "int4", "--group-size", "32", "--layout", "gptq"]
        assert run(*command, "--out", given).code == 0
    else:
        _bitsandbytes(source, given, kind)
    judged = run("evaluate", given, "--calibration", stats, "--source", source, "--json")
    assert judged.code == 0, judged.err
    assert agreement < judged.json["min_agreement"] < 1.0
    again = ["convert", given, "--calibration", stats, "--out", tmp_path / "again", "--json"]
    dtype = "int8" if kind == "int8" else "int4"
    converted = run(*again, "--dtype", dtype, "--group-size", "-1" if kind == "int8" else "32")
    assert converted.code == 0, converted.err
    report = converted.json["report"]["held_out"]
    # Judged against what was read: kept as it was where its form allows, re-quantized once from nf4.
    if kind == "nf4":
        assert agreement < report["min_agreement"] < 1.0
    else:
        assert report["min_agreement"] == 1.0
