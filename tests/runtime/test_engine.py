"""Engine and `generate` with the real base and trained heads; text, streams, and known acceptance."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from medusa_quant import ConvertOptions, Engine, InputError, SamplingParams, convert
from medusa_quant.cli import main
from medusa_quant.runtime.engine import Output
from medusa_quant.runtime.text import Detokenizer

PROMPTS = ["Write one sentence about the sea.", "Count from one to ten.", "What is the capital of France?"]


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Engine:
    return Engine(smollm2, base_dtype="int8", max_batch=3, max_len=256)


@pytest.fixture(scope="module")
def int4_heads(trained_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int4")
    convert(trained_heads, out, ConvertOptions(dtype="int4", tp=2), force=True)
    return out


@pytest.mark.parametrize(("dtype", "accepted"), [("fp16", 1.64), ("int4", 1.64)])
def test_trained_heads_keep_the_text_and_their_acceptance(
    dtype: str, accepted: float, smollm2: Path, trained_heads: Path, int4_heads: Path, plain: Engine
) -> None:
    params = SamplingParams(max_tokens=48)
    expected = plain.generate(PROMPTS, params)
    heads = trained_heads if dtype == "fp16" else int4_heads
    engine = Engine(smollm2, heads, base_dtype="int8", max_batch=3, max_len=256, speculation="tree")
    found = engine.generate(PROMPTS, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.text for output in found] == [output.text for output in expected]
    # Measured when written; a rounding elsewhere may change a draft or two of the 25 steps.
    assert engine.metrics.mean_acceptance_length == pytest.approx(accepted, abs=0.13)
    assert engine.heads is not None
    assert engine.heads.nan_heads == set()


def test_stop_strings_are_left_out(plain: Engine) -> None:
    whole = plain.generate(PROMPTS[1], SamplingParams(max_tokens=40))[0]
    stop = whole.text[10:14]
    cut = plain.generate(PROMPTS[1], SamplingParams(max_tokens=40, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_streams_give_the_whole_text(plain: Engine) -> None:
    async def collect(prompt: str) -> tuple[str, Output]:
        pieces = [piece async for piece in plain.stream(prompt, SamplingParams(max_tokens=24))]
        assert isinstance(pieces[-1], Output)
        return "".join(piece for piece in pieces if isinstance(piece, str)), pieces[-1]

    async def all_of_them() -> list[tuple[str, Output]]:
        return await asyncio.gather(*(collect(prompt) for prompt in PROMPTS))

    streamed = asyncio.run(all_of_them())
    expected = plain.generate(PROMPTS, SamplingParams(max_tokens=24))
    for (text, output), whole in zip(streamed, expected, strict=True):
        assert text == output.text == whole.text
        assert output.token_ids == whole.token_ids


def test_leaving_a_stream_cancels_it(plain: Engine) -> None:
    async def first_piece() -> None:
        stream = plain.stream(PROMPTS[0], SamplingParams(max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(first_piece())
    assert not plain.batch.has_work


def test_a_deadline_ends_a_stream(plain: Engine) -> None:
    async def run() -> Output:
        pieces = [
            piece async for piece in plain.stream(PROMPTS[0], SamplingParams(max_tokens=200), timeout=0.0)
        ]
        assert isinstance(pieces[-1], Output)
        return pieces[-1]

    assert asyncio.run(run()).finish_reason == "deadline"


def test_nothing_runs_where_one_prompt_cannot(plain: Engine) -> None:
    with pytest.raises(InputError, match="longer than the context"):
        plain.generate([[1, 2, 3], [5] * 300])
    assert not plain.batch.has_work


class Bytes:
    """A tokenizer of single bytes, so that characters arrive in pieces."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("text", ["héllo wörld 漢字 🙂!", "plain", ""])
def test_only_whole_characters_come_out(text: str) -> None:
    decoder = Detokenizer(Bytes())
    pieces = [decoder.add(byte) for byte in text.encode()]
    assert "".join(pieces) + decoder.flush() == text == decoder.text
    assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [("one END two", ("END",), "one "), ("ENENEND", ("END",), "ENEN"), ("no stop EN", ("END",), "no stop EN"),
     ("abc", ("c", "b"), "a")],
)  # fmt: skip
def test_stop_strings_across_tokens(text: str, stop: tuple[str, ...], expected: str) -> None:
    decoder = Detokenizer(Bytes(), stop)
    shown = ""
    for byte in text.encode():
        shown += decoder.add(byte)
        if decoder.stopped:
            break
    if not decoder.stopped:
        shown += decoder.flush()
    assert shown == decoder.text == expected
    assert decoder.stopped == (expected != text)


def test_generate_command(
    smollm2: Path, int4_heads: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "generate",
        str(smollm2),
        "--heads",
        str(int4_heads),
        "--base-dtype",
        "int8",
        "--max-len",
        "256",
    ]
    command += ["--max-tokens", "16", "--prompt", PROMPTS[2], "--speculation", "tree"]
    monkeypatch.setattr(sys, "argv", ["medusa-quant", *command, "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert "Paris" in report["outputs"][0]["text"]
    assert report["stats"]["mean_acceptance_length"] >= 1.0
    assert report["stats"]["tokens"] == len(report["outputs"][0]["token_ids"])
    monkeypatch.setattr(sys, "argv", ["medusa-quant", *command, "--stats"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert shown.startswith(report["outputs"][0]["text"])
    assert "mean acceptance length" in shown
