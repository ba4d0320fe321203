"""`calibrate` and `tree` as typed, on a tiny base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import RunCli
from draft_heads import save_heads

from medusa_quant.calibration import Statistics, held_out
from medusa_quant.calibration.acceptance import accepted_lengths
from medusa_quant.calibration.evaluation import evaluate
from medusa_quant.checkpoints import load_heads
from medusa_quant.checkpoints.base import base_lm_head
from medusa_quant.runtime.tree import named_tree


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("".join(f"prompt number {n}\n" for n in range(24)))
    return file


@pytest.fixture
def heads(tiny_base: Path, tmp_path: Path) -> Path:
    """Heads whose LM matrix is the base's: some of their guesses are right."""
    return save_heads(tmp_path / "heads", 2, lm_head=base_lm_head(str(tiny_base)).dense(), scale=0.02)


def _calibrate(run: RunCli, base: Path, prompts: Path, out: Path) -> None:
    done = run("calibrate", base, "--prompts", prompts, "--out", out, "--max-new-tokens", "16")
    assert done.code == 0, done.err


@pytest.mark.parametrize("form", ["txt", "prompt", "text", "messages"])
def test_every_form_of_prompts_gives_the_same_states(
    form: str, run: RunCli, tiny_base: Path, prompts: Path, tmp_path: Path
) -> None:
    texts = prompts.read_text().splitlines()[:8]
    file = tmp_path / ("p.txt" if form == "txt" else "p.jsonl")
    if form == "txt":
        lines = texts
    elif form == "messages":
        lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    else:
        lines = [json.dumps({form: text}) for text in texts]
    file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "stats.safetensors"
    done = run("calibrate", tiny_base, "--prompts", file, "--out", out, "--max-new-tokens", "9", "--json")
    assert done.code == 0, done.err
    assert done.json["prompts"] == 8
    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join(texts) + "\n")
    command = [
        "calibrate",
        tiny_base,
        "--prompts",
        plain,
        "--out",
        tmp_path / "again",
        "--max-new-tokens",
        "9",
    ]
    assert run(*command).code == 0
    first, second = Statistics.load(out), Statistics.load(tmp_path / "again")
    assert first.tokens + first.held_tokens == done.json["calibration_states"] + done.json["held_out_states"]
    assert torch.equal(first.second_moment, second.second_moment)
    assert torch.equal(first.held_states, second.held_states)


def test_what_calibrate_refuses(run: RunCli, tiny_base: Path, prompts: Path, tmp_path: Path) -> None:
    empty, out = tmp_path / "empty.txt", tmp_path / "out"
    empty.write_text("\n")
    out.write_text("mine")
    target = tmp_path / "new"
    for options, words in (
        (["--prompts", empty, "--out", target], "prompt"),
        (["--prompts", tmp_path / "none.txt", "--out", target], "none.txt"),
        (["--prompts", prompts, "--out", out], "--force"),
        (["--prompts", prompts, "--out", tmp_path], "folder"),
        (["--prompts", prompts, "--out", target, "--tokens", "0"], "--tokens"),
        (["--prompts", prompts, "--out", target, "--max-new-tokens", "100000"], "context"),
    ):
        refused = run("calibrate", tiny_base, *options)
        assert refused.code == 2, options
        assert words in refused.err
        assert len(refused.err.strip().splitlines()) == 1
    assert out.read_text() == "mine"
    assert not target.exists()


def test_a_tree_of_a_size_is_what_generate_drafts_with(
    run: RunCli, tiny_base: Path, prompts: Path, heads: Path, tmp_path: Path
) -> None:
    stats, file = tmp_path / "stats.safetensors", tmp_path / "tree.json"
    _calibrate(run, tiny_base, prompts, stats)
    made = run("tree", tiny_base, heads, "--calibration", stats, "--nodes", "4", "--out", file, "--json")
    assert made.code == 0, made.err
    assert made.json["nodes"] == 4
    choices = named_tree(str(file), 2).choices
    assert len(choices) == 3
    # The acceptance printed is that of the second half of the held-out states.
    data = held_out(Statistics.load(stats), 2)
    ranks = evaluate(load_heads(heads), data, choices).ranks
    judged = accepted_lengths(ranks[len(ranks) // 2 :], choices).double().mean()
    assert made.json["acceptance_length"] == pytest.approx(float(judged))
    written = [
        "generate",
        tiny_base,
        "--heads",
        heads,
        "--prompt",
        "one fish",
        "--max-tokens",
        "12",
        "--json",
    ]
    drafted = run(*written, "--speculation", "tree", "--tree", file)
    plain = run(*written, "--speculation", "off")
    assert drafted.code == 0, drafted.err
    assert drafted.json["outputs"][0]["text"] == plain.json["outputs"][0]["text"]
    again = run("tree", tiny_base, heads, "--calibration", stats, "--nodes", "4", "--out", file)
    assert again.code == 2
    assert "--force" in again.err


def test_auto_measures_every_size(
    run: RunCli, tiny_base: Path, prompts: Path, heads: Path, tmp_path: Path
) -> None:
    stats = tmp_path / "stats.safetensors"
    _calibrate(run, tiny_base, prompts, stats)
    made = run("tree", tiny_base, heads, "--calibration", stats, "--out", tmp_path / "tree.json", "--json")
    assert made.code == 0, made.err
    tried = made.json["tried"]
    assert tried[0]["nodes"] == 1
    assert tried[0]["acceptance_length"] == 1.0
    assert all(row["step_ms"] > 0 for row in tried)
    lengths = [row["acceptance_length"] for row in tried]
    assert lengths == sorted(lengths)
    best = next(row for row in tried if row["nodes"] == made.json["nodes"])
    assert best["tokens_per_second"] == pytest.approx(1e3 * best["acceptance_length"] / best["step_ms"])


@pytest.mark.parametrize("nodes", ["0", "300", "many"])
def test_a_size_no_tree_has(nodes: str, run: RunCli, tiny_base: Path, heads: Path, tmp_path: Path) -> None:
    command = ["tree", tiny_base, heads, "--calibration", tmp_path / "none", "--out", tmp_path / "tree.json"]
    refused = run(*command, "--nodes", nodes)
    assert refused.code == 2
    assert "--nodes" in refused.err
