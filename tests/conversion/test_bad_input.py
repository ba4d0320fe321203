"""Bad input: one clear line that names what is wrong, exit code 2, nothing written."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from command_line import Run, RunCli
from made import Tensors, as_vllm, heads_a, save, save_sharded


def assert_refused(result: Run, out: Path, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert not out.exists()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("form", ["a", "vllm"])
def test_gap_in_head_numbers(form: str, run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors = {key: value for key, value in heads_a(4).items() if not key.startswith("2.")}
    source = save(tmp_path / "s", as_vllm(tensors) if form == "vllm" else tensors)
    result = run("convert", source, "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "gap in head numbers", "[0, 1, 3]", "missing 2")


def test_a_layer_without_bias(run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors = heads_a(2, 2)
    del tensors["1.0.linear.bias"]
    result = run("convert", save(tmp_path / "s", tensors), "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "head 1 layer 0 weight has no bias", "1.0.linear.weight")


def test_a_head_without_its_layer(run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors = heads_a(2, 2)
    del tensors["1.1.linear.weight"], tensors["1.1.linear.bias"]
    result = run("convert", save(tmp_path / "s", tensors), "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "head 1 lacks ResBlock layer 1")


def test_a_head_without_lm_matrix(run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors = heads_a(3)
    del tensors["1.1.weight"]
    result = run("convert", save(tmp_path / "s", tensors), "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "head 1 has no LM matrix while others have")


@pytest.mark.parametrize(
    ("key", "shape", "found"),
    [
        ("1.0.linear.weight", (64, 32), "[64, 32]"),
        ("1.0.linear.weight", (64, 64, 1), "[64, 64, 1]"),
        ("0.0.linear.bias", (63,), "[63]"),
        ("1.1.weight", (97, 32), "[97, 32]"),
        ("1.1.weight", (96, 64), "[96, 64]"),  # V differs between heads
        ("0.1.weight", (0, 64), "empty"),
    ],
)
def test_wrong_shapes(
    key: str, shape: tuple[int, ...], found: str, run: RunCli, tmp_path: Path, out: Path
) -> None:
    tensors = heads_a(2)
    tensors[key] = torch.zeros(shape, dtype=torch.float16)
    if 0 in shape:
        tensors["1.1.weight"] = tensors[key].clone()
    result = run("convert", save(tmp_path / "s", tensors), "--dtype", "fp16", "--out", out)
    assert_refused(result, out, key, found)


@pytest.mark.parametrize(("hidden", "vocab", "words"), [(64, 98, "vocabulary"), (32, 97, "hidden size")])
def test_heads_that_do_not_fit_the_base(
    hidden: int, vocab: int, words: str, run: RunCli, tmp_path: Path, out: Path
) -> None:
    base = save(tmp_path / "base", {"lm_head.weight": torch.zeros(vocab, hidden)})
    (base / "medusa_lm_head.safetensors").rename(base / "model.safetensors")
    source = save(tmp_path / "s", heads_a())
    result = run("convert", source, "--dtype", "fp16", "--base", base, "--out", out)
    assert_refused(result, out, words, "lm_head.weight", "expected", "found")


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1, -100])
def test_truncated_safetensors(keep: int, run: RunCli, tmp_path: Path, out: Path) -> None:
    file = save(tmp_path / "s", heads_a()) / "medusa_lm_head.safetensors"
    file.write_bytes(file.read_bytes()[:keep] if keep else b"")
    result = run("convert", tmp_path / "s", "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "medusa_lm_head.safetensors", "again")


@pytest.mark.parametrize("keep", [0, 10, 1000])
def test_truncated_pt(keep: int, run: RunCli, tmp_path: Path, out: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(heads_a(), file)
    file.write_bytes(file.read_bytes()[:keep])
    assert_refused(run("convert", file, "--dtype", "fp16", "--out", out), out, "medusa_lm_head.pt")


def test_missing_shard(run: RunCli, tmp_path: Path, out: Path) -> None:
    source = save_sharded(tmp_path / "s", heads_a())
    (source / "model-00002-of-00002.safetensors").unlink()
    result = run("convert", source, "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "missing", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("change", ["moved", "extra", "unlisted", "no map", "not json"])
def test_stale_index(change: str, run: RunCli, tmp_path: Path, out: Path) -> None:
    source = save_sharded(tmp_path / "s", heads_a())
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    weight_map = index["weight_map"]
    if change == "moved":
        first, second = sorted(set(weight_map.values()))
        key = next(key for key, shard in weight_map.items() if shard == first)
        weight_map[key] = second
    elif change == "extra":
        weight_map["7.0.linear.weight"] = next(iter(weight_map.values()))
    elif change == "unlisted":
        weight_map.pop("0.1.weight")
    elif change == "no map":
        index.pop("weight_map")
    file.write_text("{" if change == "not json" else json.dumps(index))
    result = run("convert", source, "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "index")


class _Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_code_in_a_pickle_is_not_run(form: str, run: RunCli, tmp_path: Path, out: Path) -> None:
    marker, file = tmp_path / "executed", tmp_path / "medusa_lm_head.pt"
    content = {**heads_a(), "payload": _Exploit(marker)}
    if form == "torch":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    assert_refused(run("convert", file, "--dtype", "fp16", "--out", out), out, "code", "never run")
    assert not marker.exists()


def test_a_checkpoint_without_heads(run: RunCli, tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "s", {"model.layers.0.weight": torch.zeros(2, 2)})
    result = run("convert", source, "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "no Medusa heads", "model.layers.0.weight")


def test_an_unknown_key_is_not_dropped(run: RunCli, tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "s", {**heads_a(), "0.0.gate": torch.zeros(3)})
    result = run("convert", source, "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "0.0.gate")


@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4"])
def test_nonfinite_weights(dtype: str, run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors = heads_a()
    tensors["1.0.linear.weight"][3, :2] = float("nan")
    tensors["1.0.linear.weight"][5, 7] = float("-inf")
    source = save(tmp_path / "s", tensors)
    result = run("convert", source, "--dtype", dtype, "--out", out)
    assert_refused(result, out, "head 1 layer 0 weight", "2 NaN and 1 Inf", "1.0.linear.weight")
    allowed = run("convert", source, "--dtype", dtype, "--out", out, "--allow-nonfinite")
    if dtype == "fp16":
        assert allowed.code == 0
        assert run("verify", out, "--against", source).code == 0
    else:
        assert_refused(allowed, out, "2 NaN and 1 Inf")


def test_fp16_overflow(run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors = heads_a(dtype=torch.bfloat16)
    tensors["0.1.weight"][0, 0] = 1e5
    tensors["0.1.weight"][1, 1] = -3e38
    source = save(tmp_path / "s", tensors)
    result = run("convert", source, "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "head 0 lm_head: 2 values overflow float16", "65504", "--on-overflow clip")
    assert run("convert", source, "--dtype", "fp16", "--out", out, "--on-overflow", "clip").code == 0
    stored = torch.frombuffer(
        bytearray((out / "triton_models/weights/medusa.0.1.0.weight").read_bytes()), dtype=torch.float16
    ).view(64, -1)
    assert stored[0, 0] == 65504
    assert stored[1, 1] == -65504


def test_hidden_size_not_divisible_by_tp(run: RunCli, tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "s", heads_a(hidden=64))
    result = run("convert", source, "--dtype", "fp16", "--tp", "3", "--out", out)
    assert_refused(result, out, "64 features are not divisible by tp 3")


@pytest.mark.parametrize(
    ("hidden", "tp", "group", "advice"),
    [(192, 2, 64, "--group-size 32"), (192, 2, 128, "--group-size 32"), (80, 2, 32, "--group-size -1")],
)
def test_a_split_that_cuts_a_group_proposes_one_that_works(
    hidden: int, tp: int, group: int, advice: str, run: RunCli, tmp_path: Path, out: Path
) -> None:
    source = save(tmp_path / "s", heads_a(hidden=hidden))
    command = ["convert", source, "--dtype", "int4", "--tp", tp, "--lm-head-split", "hidden", "--out", out]
    result = run(*command, "--group-size", group)
    assert_refused(result, out, f"cuts a group of {group}", advice)
    assert run(*command, "--group-size", advice.split()[-1]).code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "int3"], "int3"),
        (["--dtype", "int4", "--group-size", "48"], "32, 64, 128 or -1"),
        (["--dtype", "int4", "--asymmetric", "--full-range"], "--full-range"),
        (["--dtype", "fp16", "--tp", "0"], "--tp"),
        (["--dtype", "fp16", "--layout", "onnx"], "turbomind | safetensors | hf | vllm | gptq"),
        (["--dtype", "fp16", "--layout", "gptq"], "int4 or int8"),
        (["--dtype", "int4", "--layout", "gptq", "--tp", "2"], "--tp 1"),
        (["--dtype", "int4", "--method", "awq"], "--method"),
        (["--dtype", "int4", "--method", "gptq"], "--calibration"),
        (["--dtype", "fp16", "--lm-head-split", "rows"], "vocab | hidden"),
        (["--dtype", "fp16", "--on-overflow", "wrap"], "error | clip"),
        (["--dtype", "fp16", "--dedupe-lm-head"], "--base"),
        ([], "no --dtype"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], words: str, run: RunCli, tmp_path: Path, out: Path
) -> None:
    source = save(tmp_path / "s", heads_a())
    assert_refused(run("convert", source, "--out", out, *options), out, words)


def test_no_such_source(run: RunCli, tmp_path: Path, out: Path) -> None:
    result = run("convert", tmp_path / "nowhere", "--dtype", "fp16", "--out", out)
    assert_refused(result, out, "no such file or folder")


def test_a_quantized_source_is_not_quantized_again(run: RunCli, tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "s", heads_a())
    assert run("convert", source, "--dtype", "int4", "--out", tmp_path / "int4").code == 0
    result = run("convert", tmp_path / "int4", "--dtype", "int8", "--out", out)
    assert_refused(result, out, "already int4 g 128", "original checkpoint")


def test_debug_shows_the_traceback(run: RunCli, tmp_path: Path, out: Path) -> None:
    with pytest.raises(Exception, match="no such file or folder"):
        run("--debug", "convert", tmp_path / "nowhere", "--dtype", "fp16", "--out", out)


def test_uppercase_dtype_names(run: RunCli, tmp_path: Path) -> None:
    source = save(tmp_path / "s", heads_a())
    for name, stored in (("INT8", "int8"), ("Float16", "fp16"), ("BF16", "bf16"), ("bfloat16", "bf16")):
        out = tmp_path / name
        assert run("convert", source, "--dtype", name, "--out", out).code == 0
        manifest = json.loads((out / "triton_models/weights/manifest.json").read_text())
        assert manifest["weight_type"] == stored


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_extreme_groups_convert_and_verify(dtype: str, run: RunCli, tmp_path: Path, out: Path) -> None:
    tensors: Tensors = heads_a(dtype=torch.float32, hidden=256)
    weight = tensors["0.0.linear.weight"]
    weight[0] = 0.0
    weight[1, :128] = 0.0
    weight[2] *= 1e-6 / weight[2].abs().max()
    weight[3] = 1e-40
    weight[4, 0] = 1e4
    weight[5] = torch.finfo(torch.float32).max
    source = save(tmp_path / "s", tensors)
    assert run("convert", source, "--dtype", dtype, "--out", out).code == 0
    report = run("verify", out, "--against", source, "--json")
    assert report.code == 0, report.err
    assert all(row["ok"] for row in report.json["tensors"])
    scales = torch.frombuffer(
        bytearray((out / "triton_models/weights/medusa.0.0.linear.0.scales").read_bytes()),
        dtype=torch.float32,
    )
    assert torch.isfinite(scales).all()
    assert (scales != 0).all()
