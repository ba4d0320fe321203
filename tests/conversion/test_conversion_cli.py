"""The commands around a conversion, as a user types them: dry run, inspect, verify, export, base models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Run, RunCli
from made import heads_a, save

from medusa_quant import load_heads

WEIGHTS = Path("triton_models") / "weights"


@pytest.fixture
def int4(tmp_path: Path, run: RunCli) -> Path:
    """A folder converted to int4 at tp 2; its source is tmp_path/s."""
    source = save(tmp_path / "s", heads_a(2, hidden=128, vocab=200))
    assert run("convert", source, "--dtype", "int4", "--tp", "2", "--out", tmp_path / "int4").code == 0
    return tmp_path / "int4"


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['medusa-quant', '--help']\n"
        "from medusa_quant.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_an_unknown_command_is_refused(run: RunCli) -> None:
    assert run("quantise", "x").code == 2


def test_dry_run_tells_what_convert_then_writes(tmp_path: Path, run: RunCli) -> None:
    source = save(tmp_path / "s", heads_a(2, 2, hidden=64, vocab=100))
    options = ["--dtype", "int4", "--group-size", "32", "--tp", "2", "--asymmetric"]
    plan = run("convert", source, *options, "--dry-run", "--json").json
    assert not (tmp_path / "out").exists()
    assert run("convert", source, *options, "--out", tmp_path / "out").code == 0
    manifest = json.loads((tmp_path / "out" / WEIGHTS / "manifest.json").read_text())
    written = {entry["name"]: entry for entry in manifest["files"]}
    assert {part["name"] for part in plan["parts"]} == written.keys()
    for part in plan["parts"]:
        for key in ("shape", "dtype", "bytes", "split", "start", "stop", "rank"):
            assert part[key] == written[part["name"]][key]
    assert plan["bytes"] == sum(entry["bytes"] for entry in manifest["files"])
    assert plan["fp16_bytes"] == 2 * sum(v.numel() for v in heads_a(2, 2, hidden=64, vocab=100).values())
    table = run("convert", source, *options, "--dry-run").out
    assert "medusa.1.2.1.scales" in table
    assert "of fp16" in table


def test_inspect(int4: Path, run: RunCli) -> None:
    seen = run("inspect", int4, "--json").json
    assert (seen["heads"], seen["layers"], seen["hidden_size"], seen["vocab_size"]) == (2, 1, 128, 200)
    assert (seen["tp"], seen["weight_type"], seen["group_size"]) == (2, "int4", 128)
    assert {row["tensor"] for row in seen["tensors"]} >= {"head 0 lm_head", "head 1 layer 0 weight"}
    source = run("inspect", int4.parent / "s").out
    assert "0.1.weight" in source
    assert "medusa v0.1 (A)" in source


def damage_size(folder: Path) -> str:
    file = folder / "medusa.0.0.linear.0.qweight"
    file.write_bytes(file.read_bytes() + b"x")
    return "wrong size"


def damage_byte(folder: Path) -> str:
    file = folder / "medusa.0.0.linear.0.qweight"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    return "checksum differs"


def remove(folder: Path) -> str:
    (folder / "medusa.1.1.0.scales").unlink()
    return "missing file"


def add(folder: Path) -> str:
    (folder / "medusa.7.0.linear.0.weight").write_bytes(b"")
    return "extra file"


def swap_ranks(folder: Path) -> str:
    first, second = (folder / f"medusa.0.1.{rank}.qweight" for rank in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return "checksum differs"


def nan_scale(folder: Path) -> str:
    import hashlib

    file = folder / "medusa.0.1.0.scales"
    content = bytearray(file.read_bytes())
    content[:2] = b"\x00\x7e"
    file.write_bytes(content)
    text = (folder / "manifest.json").read_text()
    entry = next(e for e in json.loads(text)["files"] if e["name"] == file.name)
    changed = text.replace(entry["sha256"], hashlib.sha256(content).hexdigest())
    (folder / "manifest.json").write_text(changed)
    return "NaN"


@pytest.mark.parametrize("damage", [damage_size, damage_byte, remove, add, swap_ranks, nan_scale])
def test_verify_finds(damage: object, int4: Path, run: RunCli) -> None:
    assert run("verify", int4).code == 0
    word = damage(int4 / WEIGHTS)  # type: ignore[operator]
    result = run("verify", int4)
    assert result.code == 1
    assert word in result.err


def test_verify_against_another_source(int4: Path, tmp_path: Path, run: RunCli) -> None:
    good = run("verify", int4, "--against", tmp_path / "s", "--json")
    assert good.code == 0
    assert all(0 <= row["relative"] < 0.2 for row in good.json["tensors"])
    other = save(tmp_path / "other", heads_a(2, hidden=128, vocab=200, seed=1))
    result = run("verify", int4, "--against", other)
    assert result.code == 1
    assert "the manifest records" in result.err
    fewer = save(tmp_path / "fewer", heads_a(1, hidden=128, vocab=200))
    assert run("verify", int4, "--against", fewer).code == 1


@pytest.mark.parametrize("layout", ["hf", "vllm", "gptq"])
def test_export(layout: str, tmp_path: Path, run: RunCli) -> None:
    source = save(tmp_path / "s", heads_a(2, vocab=96))
    assert run("convert", source, "--dtype", "int4", "--tp", "2", "--out", tmp_path / "q").code == 0
    result = run("export", tmp_path / "q", "--layout", layout, "--json")
    assert result.code == 0
    exported = load_heads(result.json["folder"])
    quantized = load_heads(tmp_path / "q")
    for tensor_id, tensor in quantized.tensors.items():
        assert torch.allclose(exported.tensors[tensor_id].dense().float(), tensor.dense().float(), atol=1e-3)
    refused = run("export", tmp_path / "q", "--layout", "turbomind")
    assert refused.code == 2
    assert "use convert" in refused.err


def make_base(folder: Path, lm_head: torch.Tensor, tied: bool = False) -> Path:
    key = "model.embed_tokens.weight" if tied else "lm_head.weight"
    base = save(
        folder, {key: lm_head, "model.norm.weight": torch.ones(lm_head.shape[1])}, {"model_type": "llama"}
    )
    (base / "medusa_lm_head.safetensors").rename(base / "model.safetensors")
    return base


@pytest.mark.parametrize("tied", [True, False])
def test_format_b_takes_the_bases_lm_matrix_or_shares_it(tied: bool, tmp_path: Path, run: RunCli) -> None:
    lm_head = torch.randn(97, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = make_base(tmp_path / "base", lm_head, tied)
    source = save(tmp_path / "s", heads_a(2, lm_head=False), {"version": "2"})
    assert run("convert", source, "--dtype", "int8", "--out", tmp_path / "shared").code == 0
    assert load_heads(tmp_path / "shared").shared_lm_head
    own = tmp_path / "own"
    assert run("convert", source, "--dtype", "bf16", "--base", base, "--out", own).code == 0
    expanded = load_heads(own)
    for head in range(2):
        matrix = expanded.lm_head(head)
        assert matrix is not None
        assert torch.equal(matrix.dense(), lm_head)
    assert run("verify", own, "--against", source).code == 0


def test_equal_lm_matrices_are_offered_to_be_shared(tmp_path: Path, run: RunCli) -> None:
    tensors = heads_a(2)
    tensors["1.1.weight"] = tensors["0.1.weight"].clone()
    base = make_base(tmp_path / "base", tensors["0.1.weight"])
    source = save(tmp_path / "s", tensors)
    result = run("convert", source, "--dtype", "fp16", "--base", base, "--out", tmp_path / "own")
    assert result.code == 0
    assert "--dedupe-lm-head would share it" in result.err
    command = ["convert", source, "--dtype", "fp16", "--base", base, "--dedupe-lm-head"]
    assert run(*command, "--out", tmp_path / "shared").code == 0
    assert load_heads(tmp_path / "shared").shared_lm_head
    other = make_base(tmp_path / "other", tensors["0.1.weight"] + 1)
    refused = run(
        "convert", source, "--dtype", "fp16", "--base", other, "--dedupe-lm-head", "--out", tmp_path / "x"
    )
    assert refused.code == 2
    assert "the LM matrices of heads 0, 1 differ from the base's" in refused.err


def test_a_gguf_base(smollm2: Path, trained_heads: Path, tmp_path: Path, run: RunCli) -> None:
    command = ["convert", trained_heads, "--dtype", "int8", "--base", smollm2, "--tp", "2"]
    result = run(*command, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    converted = load_heads(tmp_path / "out")
    assert (converted.num_heads, converted.vocab_size, converted.hidden_size) == (4, 49152, 576)
    assert run("verify", tmp_path / "out").code == 0


def test_warnings_are_said_once_and_not_eaten_as_markup(tmp_path: Path, run: RunCli) -> None:
    source = save(tmp_path / "a [H, V]", heads_a(3), {"medusa_num_heads": 5})
    result: Run = run("convert", source, "--dtype", "fp16", "--out", tmp_path / "out")
    assert result.err.count("medusa_num_heads is 5, the tensors say 3") == 1
    assert "a [H, V]" in result.err


def test_a_token_map_travels(tmp_path: Path, run: RunCli) -> None:
    from made import as_vllm

    tensors = as_vllm(heads_a(2, vocab=64))
    tensors["token_map"] = torch.arange(0, 128, 2)
    source = save(tmp_path / "s", tensors, {"vocab_size": 128})
    assert run("convert", source, "--dtype", "int8", "--tp", "2", "--out", tmp_path / "out").code == 0
    assert run("convert", tmp_path / "out", "--layout", "vllm", "--out", tmp_path / "back").code == 0
    token_map = load_heads(tmp_path / "back").token_map()
    assert token_map is not None
    assert token_map.dense().tolist() == list(range(0, 128, 2))
