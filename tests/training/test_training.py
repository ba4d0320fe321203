"""Training: its text, its targets, its loss and its quantized view, on a tiny base."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draft_heads import HIDDEN, VOCAB, save_heads
from tiny_models import build_model

from medusa_quant import ConvertOptions, convert, load_heads
from medusa_quant.cli import main
from medusa_quant.errors import InputError
from medusa_quant.quantization import Scheme
from medusa_quant.runtime.model import load_base
from medusa_quant.training.corpus import Corpus, CorpusOptions, write_corpus
from medusa_quant.training.heads import TrainableHeads, quantized_values
from medusa_quant.training.heads import save_heads as save_trained
from medusa_quant.training.prompts import MAX_PROMPTS, default_prompts
from medusa_quant.training.trainer import TrainOptions, accuracy, seen_vocabulary, train

OPTIONS = CorpusOptions(tokens=10_000, max_new_tokens=12, batch_size=4)


class Words:
    """A tokenizer without a chat template: one token a letter."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 100 for letter in text]}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_model(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(load_base(base_folder), _prompts(), OPTIONS, tmp_path_factory.mktemp("text"), "base")


def _prompts(count: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (4 + n % 5,), generator=generator).tolist() for n in range(count)]


def _lm_rows(base_folder: Path, rows: torch.Tensor) -> torch.Tensor:
    from medusa_quant.checkpoints.base import base_lm_head

    return base_lm_head(str(base_folder)).dense()[rows].float()


def test_default_prompts_are_distinct_and_seeded() -> None:
    everything = default_prompts(MAX_PROMPTS, seed=1)
    assert len(set(everything)) == MAX_PROMPTS
    assert default_prompts(10, seed=1) == everything[:10] != default_prompts(10, seed=2)


def test_greedy_text_is_the_bases_own_and_states_predict_it(base_folder: Path, corpus: Corpus) -> None:
    base = load_base(base_folder)
    assert torch.equal(base.logits(corpus.rows(torch.arange(12))).argmax(1)[:1].int(), corpus.chosen[:1])
    # Even prompts are greedy: every token is the likeliest; odd ones are drawn, and some are not.
    ends = (corpus.left == 0).nonzero().squeeze(1) + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    likeliest = corpus.top_ids[:, 0] == corpus.chosen
    shares = [likeliest[a:b].float().mean().item() for a, b in zip(starts, ends, strict=True)]
    assert min(shares[0::2]) == 1.0
    assert min(shares[1::2]) < 1.0


def test_targets_are_the_tokens_two_and_more_ahead(corpus: Corpus) -> None:
    length = int(corpus.left[0]) + 1
    text = corpus.chosen[:length].tolist()
    numbers = torch.arange(length)
    for head in range(3):
        place, known = corpus.targets(numbers, head)
        assert known.tolist() == [t + 1 + head < length for t in range(length)]
        # State t wrote text[t] (token t+1), so head i learns text[t + 1 + i] (token t+2+i).
        assert corpus.chosen[place[known]].tolist() == text[1 + head :]


def test_a_corpus_is_continued_where_it_stopped(base_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    base = load_base(base_folder)
    short = CorpusOptions(tokens=60, max_new_tokens=12, batch_size=4)
    write_corpus(base, _prompts(), short, tmp_path, "base")
    kept = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    resumed = write_corpus(base, _prompts(), OPTIONS, tmp_path, "base")
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir() if file.name in kept} == kept
    assert torch.equal(resumed.chosen, corpus.chosen)
    everything = torch.arange(corpus.chosen.numel())
    assert torch.equal(resumed.rows(everything), corpus.rows(everything))
    with pytest.raises(InputError, match="text of another base"):
        write_corpus(base, _prompts()[1:], OPTIONS, tmp_path, "base")


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_training_resumes_to_the_same_heads_and_learns(
    base_folder: Path, corpus: Corpus, tmp_path: Path, loss: str
) -> None:
    vocabulary = seen_vocabulary(corpus)
    options = TrainOptions(epochs=30, batch_size=8, learning_rate=3e-3, loss=loss)

    def fresh() -> TrainableHeads:
        return TrainableHeads(2, 1, _lm_rows(base_folder, vocabulary), False, None)

    straight, halted = fresh(), fresh()
    before = accuracy(straight, corpus, vocabulary, "fp32")
    losses: list[float] = []
    train(straight, corpus, vocabulary, options, tmp_path / "a", lambda *step: losses.append(step[2]))
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    assert (tmp_path / "a").exists()

    class Stopped(Exception):
        pass

    def stop(done: int, steps: int, value: float) -> None:
        if done == 130:
            raise Stopped

    with pytest.raises(Stopped):
        train(halted, corpus, vocabulary, options, tmp_path / "b", stop)
    continued: list[int] = []
    second = fresh()
    train(second, corpus, vocabulary, options, tmp_path / "b", lambda *step: continued.append(step[0]))
    assert continued[0] == 101, "not continued from the checkpoint of step 100"
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))
    assert accuracy(straight, corpus, vocabulary, "fp32") != before


def test_loss_equals_plain_cross_entropy_on_the_restricted_vocabulary(
    base_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    vocabulary = seen_vocabulary(corpus)
    rows = _lm_rows(base_folder, vocabulary)
    heads = TrainableHeads(1, 1, rows, False, None)
    numbers = corpus.usable(1, held=False)
    seen: list[float] = []
    options = TrainOptions(epochs=1, batch_size=numbers.numel())
    train(heads, corpus, vocabulary, options, tmp_path / "c", lambda *step: seen.append(step[2]))
    # A head whose ResBlock is zero is the LM matrix on the state itself.
    logits = corpus.rows(numbers).double() @ rows.double().t()
    wanted = corpus.chosen[numbers + 1].long()
    local = torch.searchsorted(vocabulary, wanted)
    assert seen == [pytest.approx(float(F.cross_entropy(logits, local)), rel=1e-5)]


@pytest.mark.parametrize(("dtype", "group_size"), [("int4", 32), ("int8", -1)])
def test_qat_sees_what_conversion_writes(
    tmp_path: Path, corpus: Corpus, base_folder: Path, dtype: str, group_size: int
) -> None:
    scheme = Scheme.for_dtype(dtype, group_size)
    vocabulary = torch.arange(VOCAB)
    source = load_heads(save_heads(tmp_path / "heads", num_heads=2))
    heads = TrainableHeads(2, 1, _lm_rows(base_folder, vocabulary), True, scheme)
    heads.start_from(source, vocabulary)
    with torch.no_grad():
        for parameter in heads.parameters():
            # Heads are saved as fp16; a rounded value next to a code's edge would get the next code.
            parameter.copy_(parameter.half().float())
    save_trained(heads, tmp_path / "saved", _lm_rows(base_folder, vocabulary), vocabulary, {})
    options = ConvertOptions(dtype=dtype, group_size=group_size)
    convert(tmp_path / "saved", tmp_path / "out", options)
    written = load_heads(tmp_path / "out")
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(2):
        x = states + F.silu(
            states @ written.resblock_weight(head, 0).dense().float().t()
            + written.resblock_bias(head, 0).dense().float()
        )
        lm_head = written.lm_head(head)
        assert lm_head is not None
        torch.testing.assert_close(heads(states, head), x @ lm_head.dense().float().t(), rtol=1e-3, atol=1e-2)
    logits = heads(states, 0)
    logits.sum().backward()
    assert heads.weight.grad is not None
    assert bool((heads.weight.grad[0] != 0).any())


def test_a_teacher_wins_back_what_quantization_took(
    base_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    vocabulary = seen_vocabulary(corpus)
    rows = _lm_rows(base_folder, vocabulary)
    source = load_heads(save_heads(tmp_path / "heads", num_heads=2))

    def fresh(scheme: Scheme | None) -> TrainableHeads:
        heads = TrainableHeads(2, 1, rows, True, scheme)
        heads.start_from(source, vocabulary)
        return heads

    teacher, student = fresh(None), fresh(Scheme.for_dtype("int4", -1))
    seen: list[float] = []
    options = TrainOptions(epochs=12, batch_size=64, learning_rate=3e-3, loss="teacher")
    learn = partial(train, corpus=corpus, vocabulary=vocabulary, teacher=teacher)
    learn(student, options=options, checkpoint=tmp_path / "a", progress=lambda *step: seen.append(step[2]))
    assert sum(seen[-5:]) < 0.7 * sum(seen[:5])
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), fresh(None).parameters(), strict=True))
    # Heads that are not quantized have nothing to learn from themselves.
    same: list[float] = []
    one = TrainOptions(epochs=1, batch_size=64, loss="teacher")
    learn(fresh(None), options=one, checkpoint=tmp_path / "b", progress=lambda *step: same.append(step[2]))
    assert abs(same[0]) < 1e-6


def test_tokens_never_trained_keep_the_rows_training_started_from(tmp_path: Path, base_folder: Path) -> None:
    rows = torch.tensor([3, 7, 20])
    full = _lm_rows(base_folder, torch.arange(VOCAB))
    source = load_heads(save_heads(tmp_path / "heads", num_heads=2))
    heads = TrainableHeads(2, 1, full[rows], True, None)
    heads.start_from(source, rows)
    save_trained(heads, tmp_path / "out", full, rows, {}, source)
    for head in range(2):
        found, wanted = load_heads(tmp_path / "out").lm_head(head), source.lm_head(head)
        assert found is not None
        assert wanted is not None
        assert torch.equal(found.dense(), wanted.dense().half())


def test_quantized_values_are_conversions_own() -> None:
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(2))
    seen = quantized_values(weight, Scheme.for_dtype("int4", 32))
    codes = seen / seen.abs().amax(1, keepdim=True)
    assert not torch.equal(seen, weight)
    assert (seen - weight).abs().max() < weight.abs().max() / 7
    assert max(len(row[:32].unique()) for row in codes) <= 15


@pytest.mark.parametrize("own", [False, True])
def test_saved_heads_load_back(tmp_path: Path, base_folder: Path, own: bool) -> None:
    rows = torch.tensor([3, 7, 20])
    full = _lm_rows(base_folder, torch.arange(VOCAB))
    heads = TrainableHeads(2, 2, full[rows], own, None)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_trained(heads, tmp_path / "out", full, rows, {})
    found = load_heads(tmp_path / "out")
    assert (found.num_heads, found.num_layers, found.shared_lm_head) == (2, 2, not own)
    assert torch.equal(found.resblock_weight(1, 1).dense(), heads.weight[1, 1].detach().half())
    lm_head = found.lm_head(1)
    if own:
        assert lm_head is not None
        assert torch.equal(lm_head.dense()[rows], heads.lm_rows[1].detach().half())
        others = [row for row in range(VOCAB) if row not in rows.tolist()]
        assert torch.equal(lm_head.dense()[others], full[others].half())


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["medusa-quant", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_command_trains_and_recovers(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medusa_quant.runtime.model.load_tokenizer", lambda path: Words())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"tell me about {'abcdefgh'[n % 8]}{n}" for n in range(40)))
    common = ("--heads", 2, "--max-new-tokens", 12, "--tokens", 300, "--base-dtype", "fp32", "--json")
    common += ("--prompts", prompts, "--cache", tmp_path / "cache", "--batch-size", 32)
    assert _run(monkeypatch, "train", base_folder, "--out", tmp_path / "a", *common) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["states"] >= 300
    assert first["held_out_rows"] > 0
    assert load_heads(tmp_path / "a").num_heads == 2
    qat = ("--init", tmp_path / "a", "--qat", "int4", "--group-size", 32)
    assert _run(monkeypatch, "train", base_folder, "--out", tmp_path / "b", *common, *qat) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["before"] != first["before"], "the run did not start from --init"
    assert _run(monkeypatch, "train", base_folder, "--out", tmp_path / "a", *common) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lm-head", "both"), "bad --lm-head"),
        (("--loss", "mse"), "bad --loss"),
        (("--dtype", "fp16"), "bad --dtype"),
        (("--qat", "int2"), "bad --qat"),
        (("--heads", "0"), "bad --heads"),
        (("--tokens", "0"), "bad --tokens"),
        (("--group-size", "32"), "--group-size belongs to --qat"),
        (("--loss", "teacher"), "--init"),
        (("--init", "nowhere"), "nowhere"),
    ],
)
def test_bad_flags_end_with_one_line(
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert _run(monkeypatch, "train", base_folder, "--out", tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_initial_heads_of_another_shape_are_refused(tmp_path: Path, base_folder: Path) -> None:
    source = load_heads(save_heads(tmp_path / "heads", num_heads=3))
    heads = TrainableHeads(2, 1, _lm_rows(base_folder, torch.arange(VOCAB)), False, None)
    with pytest.raises(InputError, match="3 heads"):
        heads.start_from(source, torch.arange(VOCAB))
