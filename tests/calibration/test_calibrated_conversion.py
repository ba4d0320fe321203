"""calibrate -> convert -> evaluate on a tiny base, as a user types it; the gate; what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import RunCli
from safetensors.torch import load_file, save_file
from tiny_models import build_model

from medusa_quant.calibration import Statistics, evaluate, held_out
from medusa_quant.calibration.acceptance import accepted_lengths, token_ranks
from medusa_quant.calibration.collect import CollectOptions, collect
from medusa_quant.calibration.prompts import Prompt, read_prompts
from medusa_quant.errors import InputError
from medusa_quant.runtime.model import LlamaModel, load_base

HIDDEN, VOCAB = 48, 131


class Letters:
    """A tokenizer of one token a character."""

    chat_template = None

    def __call__(self, text: str) -> Any:
        return {"input_ids": [3 + ord(c) % 120 for c in text]}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_model(folder)
    return folder


@pytest.fixture(scope="module")
def base(base_folder: Path) -> LlamaModel:
    return load_base(base_folder)


PROMPTS = [Prompt((("user", f"prompt number {n} {'x' * (n % 7)}"),)) for n in range(24)]
IDENTITY = {"path": "tiny", "hidden_size": HIDDEN, "vocab_size": VOCAB}


@pytest.fixture(scope="module")
def stats(base: LlamaModel, base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats")
    identity = {**IDENTITY, "path": str(base_folder)}
    result = collect(
        base, Letters(), PROMPTS, CollectOptions(max_new_tokens=20), folder / "partial", identity
    )
    result.statistics.save(folder / "stats.safetensors")
    return folder / "stats.safetensors"


@pytest.fixture
def heads(base_folder: Path, tmp_path: Path) -> Path:
    """Two heads whose LM matrix is the base's."""
    lm_head = load_file(base_folder / "model.safetensors")["lm_head.weight"]
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.05
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = lm_head.clone()
    (tmp_path / "heads").mkdir()
    save_file(tensors, tmp_path / "heads" / "medusa_lm_head.safetensors")
    return tmp_path / "heads"


def test_statistics_are_those_of_the_states(base: LlamaModel, stats: Path) -> None:
    loaded = Statistics.load(stats)
    assert loaded.tokens == loaded.states.shape[0]  # the sample holds all of so few
    moment = loaded.states.double().t() @ loaded.states.double()
    assert torch.allclose(loaded.second_moment, moment, rtol=1e-6)
    assert torch.equal(loaded.absmax, loaded.states.abs().amax(0))
    # The base's next token at a held-out state is its argmax there.
    logits = base.logits(loaded.held_states)
    known = loaded.held_next[:, 0] >= 0
    assert torch.equal(logits.argmax(1)[known], loaded.held_next[known, 0].long())
    assert loaded.held_top_ids[:, 0].tolist() == logits.argmax(1).tolist()


def test_a_resumed_run_equals_a_straight_one(base: LlamaModel, tmp_path: Path) -> None:
    options = CollectOptions(max_new_tokens=8, batch_size=4)
    straight = collect(base, Letters(), PROMPTS, options, tmp_path / "a", IDENTITY).statistics
    calls = 0

    def interrupt(done: int, total: int | None, rate: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(base, Letters(), PROMPTS, options, tmp_path / "b", IDENTITY, interrupt)
    result = collect(base, Letters(), PROMPTS, options, tmp_path / "b", IDENTITY)
    assert result.resumed > 0
    for name, value in vars(straight).items():
        other = getattr(result.statistics, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_a_partial_file_of_another_run_is_refused(base: LlamaModel, tmp_path: Path) -> None:
    options = CollectOptions(max_new_tokens=4, batch_size=4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(base, Letters(), PROMPTS, options, tmp_path / "p", IDENTITY, interrupt)
    with pytest.raises(InputError):
        collect(base, Letters(), PROMPTS[:9], options, tmp_path / "p", IDENTITY)


def test_prompts_longer_than_the_context(base: LlamaModel, tmp_path: Path) -> None:
    long = [Prompt((("user", "y" * 500),)), *PROMPTS[:6]]
    result = collect(base, Letters(), long, CollectOptions(max_new_tokens=4), tmp_path / "p", IDENTITY)
    assert any("context" in warning or "longer" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "one\n\ntwo\n", ["one", "two"]),
        ("a.jsonl", '{"prompt": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}', ["hi"]),
    ],
)
def test_prompt_files(name: str, text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert [prompt.messages[-1][1] for prompt in read_prompts(tmp_path / name)] == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", " \n", "empty"),
        ("a.jsonl", '{"prompt": 3}', "no prompt in this line"),
        ("a.jsonl", "{", "not valid JSON"),
        ("a.jsonl", '{"messages": []}', "messages"),
    ],
)
def test_prompt_files_that_are_none(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        read_prompts(tmp_path / name)


def test_convert_judges_and_records(run: RunCli, heads: Path, stats: Path, tmp_path: Path) -> None:
    result = run(
        "convert",
        heads,
        "--dtype",
        "int4",
        "--method",
        "gptq",
        "--calibration",
        stats,
        "--out",
        tmp_path / "o",
    )
    assert result.code == 0, result.err
    assert "predicted acceptance length" in result.out
    manifest = json.loads((tmp_path / "o/triton_models/weights/manifest.json").read_text())
    report = manifest["report"]["held_out"]
    assert len(report["heads"]) == 2
    assert 0.5 < report["acceptance_ratio"] <= 1.2
    assert manifest["report"]["calibration"]["head 0 layer 0 weight"]["damping"] > 0
    assert {entry["method"] for entry in manifest["files"] if entry["part"] == "qweight"} == {"gptq"}
    judged = run("evaluate", tmp_path / "o", "--calibration", stats, "--source", heads, "--json")
    assert judged.code == 0
    assert json.loads(judged.out)["acceptance_length"] == pytest.approx(report["acceptance_length"])
    assert run("verify", tmp_path / "o", "--against", heads).code == 0


@pytest.fixture
def fragile_heads(heads: Path) -> Path:
    """Heads that draft well, and whose LM rows hold one large value on a feature that is near zero."""
    tensors = load_file(heads / "medusa_lm_head.safetensors")
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] *= 0.01
        tensors[f"{head}.1.weight"][:, 7] += 40 * tensors[f"{head}.1.weight"].abs().amax()
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    return heads


@pytest.mark.parametrize("limit", ["--min-agreement", "--min-acceptance-ratio"])
def test_the_gate_keeps_the_old_folder(
    limit: str, run: RunCli, fragile_heads: Path, stats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    assert run("convert", fragile_heads, "--dtype", "fp16", "--out", out).code == 0
    before = {file.name: file.read_bytes() for file in (out / "triton_models/weights").iterdir()}
    command = ["convert", fragile_heads, "--dtype", "int4", "--group-size", "-1", "--out", out, "--force"]
    result = run(*command, "--calibration", stats, limit, "1.0")
    assert result.code == 3, result.err
    assert "below" in result.err
    assert {file.name: file.read_bytes() for file in (out / "triton_models/weights").iterdir()} == before
    judged = ["evaluate", fragile_heads, "--calibration", stats, "--source", fragile_heads]
    assert run(*judged, limit, "1.0").code == 0


def test_evaluation_by_hand(base: LlamaModel, heads: Path, stats: Path) -> None:
    from medusa_quant import load_heads

    data = held_out(Statistics.load(stats), 2)
    loaded = load_heads(heads)
    report = evaluate(loaded, data, [(0,), (1,), (0, 0)], loaded)
    ranks = []
    for head in range(2):
        weight, lm_head = loaded.resblock_weight(head, 0).dense(), loaded.lm_head(head)
        assert lm_head is not None
        state = data.states + torch.nn.functional.silu(data.states @ weight.t())
        logits = state @ lm_head.dense().t()
        own = logits.gather(1, data.tokens[:, head : head + 1])
        ranks.append((logits > own).sum(1))
        assert report.heads[head].accuracy[1] == pytest.approx(
            float((ranks[-1] == 0).double().mean()), abs=0.02
        )
        assert report.heads[head].agreement == {1: 1.0, 5: 1.0, 10: 1.0}
        assert report.heads[head].output_error == 0.0
    first, second = ranks
    gained = torch.where((first == 0) & (second == 0), 2, torch.where(first <= 1, 1, 0))
    assert report.acceptance == pytest.approx(1 + float(gained.double().mean()), abs=0.02)


def test_acceptance_of_a_tree() -> None:
    ranks = torch.tensor([[0, 0], [1, 0], [0, 3], [2, 0]])
    assert accepted_lengths(ranks, [(0,), (0, 0), (1,)]).tolist() == [3, 2, 2, 1]
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])
    assert token_ranks(logits, torch.tensor([2, 0])).tolist() == [1, 1]


@pytest.mark.parametrize("case", ["hidden", "vocab", "no file", "cut group"])
def test_what_cannot_work_is_said_before_work_begins(
    case: str, run: RunCli, heads: Path, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dtype", "int4", "--method", "gptq", "--calibration", str(stats), "--group-size", "32"]
    source = heads
    if case in ("hidden", "vocab"):
        size, vocab = (32, VOCAB) if case == "hidden" else (HIDDEN, 99)
        tensors = {"0.0.linear.weight": torch.zeros(size, size), "0.1.weight": torch.zeros(vocab, size)}
        source = tmp_path / "other"
        source.mkdir()
        save_file(tensors, source / "medusa_lm_head.safetensors")
    elif case == "no file":
        options[5] = str(tmp_path / "missing")
    else:
        options += ["--tp", "2", "--lm-head-split", "hidden"]

    def fail(*_: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("medusa_quant.calibration.quantizer.solve", fail)
    result = run("convert", source, *options, "--out", tmp_path / "o")
    assert result.code == 2, result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "o").exists()


def dtypes_of(out: Path) -> dict[tuple[int, str], str]:
    from medusa_quant import load_heads

    return {(t.id.head, t.id.role): t.dtype for t in load_heads(out) if t.id.role != "resblock.bias"}


def test_a_plan_by_hand(run: RunCli, heads: Path, tmp_path: Path) -> None:
    own = {"head": 1, "role": "lm_head.weight", "dtype": "int4", "group_size": 32}
    (tmp_path / "plan.json").write_text(json.dumps({"dtype": "int8", "choices": [own]}))
    result = run("convert", heads, "--plan", tmp_path / "plan.json", "--tp", "2", "--out", tmp_path / "o")
    assert result.code == 0, result.err
    expected = {(0, "resblock.weight"): "int8", (0, "lm_head.weight"): "int8"}
    expected |= {(1, "resblock.weight"): "int8", (1, "lm_head.weight"): "int4"}
    assert dtypes_of(tmp_path / "o") == expected
    manifest = json.loads((tmp_path / "o/triton_models/weights/manifest.json").read_text())
    assert manifest["weight_type"] == "mixed"
    # Re-sharding keeps the mix, bit for bit.
    assert run("convert", tmp_path / "o", "--out", tmp_path / "again").code == 0
    assert dtypes_of(tmp_path / "again") == expected
    assert run("verify", tmp_path / "again", "--against", tmp_path / "o").code == 0
    for broken in ('{"choices": [{"head": 9, "role": "lm_head.weight", "dtype": "int4"}]}', '{"x": 1}', "["):
        (tmp_path / "plan.json").write_text(broken)
        refused = run("convert", heads, "--plan", tmp_path / "plan.json", "--out", tmp_path / "no")
        assert refused.code == 2
        assert len(refused.err.strip().splitlines()) == 1


def test_dtypes_within_a_budget(run: RunCli, heads: Path, stats: Path, tmp_path: Path) -> None:
    matrices = 2 * (HIDDEN * HIDDEN + VOCAB * HIDDEN)
    sizes = {}
    for budget in (2.0 * matrices, 1.2 * matrices, 0.7 * matrices):
        out = tmp_path / f"b{int(budget)}"
        command = ["convert", heads, "--dtype", "auto", "--budget-mb", budget / 1e6, "--calibration", stats]
        result = run(*command, "--out", out)
        assert result.code == 0, result.err
        manifest = json.loads((out / "triton_models/weights/manifest.json").read_text())
        sizes[budget] = sum(e["bytes"] for e in manifest["files"] if e["part"] != "bias")
        assert "acceptance" in result.out
    # Vocabulary padding comes on top of what was planned.
    assert sizes[2.0 * matrices] > sizes[1.2 * matrices] > sizes[0.7 * matrices]
    assert set(dtypes_of(tmp_path / f"b{int(2.0 * matrices)}").values()) == {"fp16"}
    command = ["convert", heads, "--dtype", "auto", "--budget-mb", "0.001", "--calibration", stats]
    too_small = run(*command, "--out", tmp_path / "x")
    assert too_small.code == 2
    assert "at least" in too_small.err


def test_dtypes_within_a_loss(run: RunCli, heads: Path, stats: Path, tmp_path: Path) -> None:
    command = ["convert", heads, "--dtype", "auto", "--calibration", stats, "--json"]
    lossless = run(*command, "--max-acceptance-loss", "0", "--out", tmp_path / "none")
    assert lossless.code == 0, lossless.err
    lossy = run(*command, "--max-acceptance-loss", "0.5", "--out", tmp_path / "half")
    assert json.loads(lossy.out)["bytes"] < json.loads(lossless.out)["bytes"]
    mixed = json.loads(lossy.out)["mixed"]
    assert mixed["choices"]
    sizes = [point["bytes"] for point in mixed["curve"]]
    assert sizes == sorted(sizes, reverse=True)
    assert mixed["curve"][-1]["acceptance_length"] >= mixed["source_acceptance_length"] - 0.5
    for wrong in (["--dtype", "auto"], ["--dtype", "int8", "--budget-mb", "1"]):
        assert run("convert", heads, *wrong, "--calibration", stats, "--out", tmp_path / "x").code == 2
