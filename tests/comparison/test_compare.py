"""The comparison, run whole on a tiny base through the command line; and its arithmetic."""

from __future__ import annotations

import csv
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import save_heads

from medusa_quant.cli import main
from medusa_quant.comparison import measure
from medusa_quant.comparison.measure import check_identity
from medusa_quant.comparison.results import PeerRun, Results, Run
from medusa_quant.comparison.settings import PLAIN, Settings, Variant, variants_of
from medusa_quant.comparison.summary import rows_of
from medusa_quant.errors import InputError, VerifyError
from medusa_quant.runtime.chat import encode_chat


@pytest.fixture(scope="module")
def oracle_heads(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads whose LM matrix is the base's: their guesses are plausible, not always right."""
    from medusa_quant.checkpoints.base import base_lm_head

    folder = tmp_path_factory.mktemp("compared") / "heads"
    return save_heads(folder, lm_head=base_lm_head(str(tiny_base)).dense(), scale=0.02)


@pytest.fixture(scope="module")
def arguments(tiny_base: Path, oracle_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    prompts = folder / "prompts.txt"
    prompts.write_text("one fish\ntwo fish\nred fish\nblue fish\n")
    # Statistics are judged by, and given here, so that a test does not pay for those over shipped prompts.
    statistics = folder / "statistics.safetensors"
    command = ["calibrate", str(tiny_base), "--prompts", str(prompts), "--out", str(statistics)]
    assert _run(*command, "--max-new-tokens", "12") == 0
    options = ["--dtypes", "fp16,int8,int4", "--group-size", "32", "--batch", "1,2", "--trees", "chain,auto"]
    options += ["--tokens", "8", "--repeats", "2", "--prompts", str(prompts)]
    return ["compare", str(tiny_base), str(oracle_heads), *options, "--calibration", str(statistics)]


@pytest.fixture(scope="module")
def finished(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "out"
    assert _run(*arguments, "--out", str(out)) == 0
    return out


def _run(*words: str) -> int:
    before, sys.argv = sys.argv, ["medusa-quant", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def test_every_row_is_there_in_json_and_csv(finished: Path) -> None:
    rows = json.loads((finished / "results.json").read_text())["rows"]
    names = {(row["variant"], row["tree"], row["batch"]) for row in rows}
    drafted = {(v, t, b) for v in ("fp16", "int8", "int4-g32") for t in ("chain", "auto") for b in (1, 2)}
    assert names == drafted | {(PLAIN, "", 1), (PLAIN, "", 2)}
    for row in rows:
        assert row["repeats"] == 2
        assert row["tokens_per_second_min"] <= row["tokens_per_second"] <= row["tokens_per_second_max"]
        assert row["peak_memory_bytes"] > 0
        assert (row["variant"] == PLAIN) == (row["bytes"] == 0)
    with open(finished / "rows.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["variant"], int(row["batch"])) for row in written] == [
        (row["variant"], row["batch"]) for row in rows
    ]


def test_acceptance_is_what_the_text_it_wrote_gives_when_read_again(
    smollm2: Path, trained_heads: Path, tmp_path: Path
) -> None:
    """Real heads, chain: the loop's count against a simulation over whole texts."""
    from medusa_quant import load_heads
    from medusa_quant.runtime.heads import DraftHeads
    from medusa_quant.runtime.model import Segment, load_base, load_tokenizer

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Count from one to twenty.\nWrite a Python loop over a list.\n")
    statistics = tmp_path / "statistics.safetensors"
    calibrate = ["calibrate", str(smollm2), "--prompts", str(prompts), "--out", str(statistics)]
    assert _run(*calibrate, "--max-new-tokens", "16") == 0
    options = ["--dtypes", "fp16", "--lm-head", "shared", "--trees", "chain", "--repeats", "1"]
    options += ["--tokens", "40", "--prompts", str(prompts), "--calibration", str(statistics)]
    assert _run("compare", str(smollm2), str(trained_heads), *options, "--out", str(tmp_path / "out")) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    row = next(row for row in content["rows"] if row["variant"] == "fp16")
    model, tokenizer = load_base(smollm2, "int8"), load_tokenizer(smollm2)
    heads = DraftHeads(load_heads(tmp_path / "out" / "heads" / "fp16"), model)
    lengths = []
    for prompt, text in zip(prompts.read_text().splitlines(), content["reference"], strict=True):
        tokens = [*encode_chat(tokenizer, [{"role": "user", "content": prompt}]), *text]
        with torch.inference_mode():
            segments, cache = [Segment(0, 0, len(tokens), None)], model.new_cache(1, len(tokens))
            states = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), segments, cache)
            guesses = heads.guess(states, 1)[:, :, 0].tolist()
        place = len(tokens) - len(text) - 1
        # The last few drafts reach past the text that is known.
        while place + 5 < len(tokens):
            right = 0
            while right < 4 and guesses[place][right] == tokens[place + 2 + right]:
                right += 1
            lengths.append(1 + right)
            place += 1 + right
    assert sum(lengths) / len(lengths) > 1.1
    # Two to four of some sixty drafts are not simulated.
    assert row["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths), abs=0.08)


def test_report_is_one_file_with_plots(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    opened: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            opened.append(tag)
            for name, value in attrs:
                assert not (name in ("src", "href") and value.startswith(("http", "//")))

    Parser().feed(page)
    assert opened.count("svg") == 4
    assert "<script" not in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for text in ("int4-g32, chain", "Speed-up by batch", "Every row wrote the same text"):
        assert text in page


def test_a_finished_comparison_is_not_measured_again(
    arguments: list[str], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((finished / "results.json").read_text())["runs"]
    monkeypatch.setattr(measure.Bench, "run", lambda *_: pytest.fail("measured again"))
    assert _run(*arguments, "--out", str(finished)) == 0
    assert json.loads((finished / "results.json").read_text())["runs"] == before


def test_an_interrupted_comparison_goes_on_where_it_stopped(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = measure.Bench.run, []

    def counted(self: Any, *row: Any) -> Any:
        calls.append(row)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(self, *row)

    monkeypatch.setattr(measure.Bench, "run", counted)
    assert _run(*arguments, "--out", str(tmp_path)) == 130
    done = json.loads((tmp_path / "results.json").read_text())["complete"]
    assert done == [[0, 1]]
    assert _run(*arguments, "--out", str(tmp_path)) == 0
    # 7 rows a group: the cut-off group begins anew, the finished one does not.
    assert len(calls) == 10 + 3 * 7
    assert len(json.loads((tmp_path / "results.json").read_text())["complete"]) == 4


def test_other_settings_are_refused_unless_forced(
    arguments: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*arguments, "--tokens", "9", "--out", str(finished)) == 2
    assert "other settings" in capsys.readouterr().err


def test_another_text_is_exit_1_with_the_difference(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = measure.Bench.run

    def doctored(self: Any, variant: str, tree: str, batch: int, repeat: int) -> Any:
        run, tokens = real(self, variant, tree, batch, repeat)
        if variant == "int8":
            tokens[1][3] = 40 if tokens[1][3] != 40 else 41
        return run, tokens

    monkeypatch.setattr(measure.Bench, "run", doctored)
    assert _run(*arguments, "--out", str(tmp_path)) == 1
    assert "prompt 1 differs from plain greedy decoding at token 3" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_reported_not_hidden(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--peers", "vllm", "--dtypes", "int8", "--batch", "1", "--repeats", "1"]
    assert _run(*arguments, *options, "--out", str(tmp_path)) == 0
    assert "No module named 'vllm'" in capsys.readouterr().err
    assert "No module named" in (tmp_path / "report.html").read_text()


def test_transformers_as_a_peer_writes_as_many_tokens(arguments: list[str], tmp_path: Path) -> None:
    options = ["--peers", "transformers", "--dtypes", "int8", "--batch", "2", "--repeats", "1"]
    assert _run(*arguments, *options, "--out", str(tmp_path)) == 0
    peer = json.loads((tmp_path / "results.json").read_text())["peers"][0]
    assert peer["error"] is None
    assert peer["tokens"] == 4 * 8
    assert peer["version"].startswith("transformers ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtypes", "int3"], "int3"),
        (["--methods", "best"], "bad --methods"),
        (["--batch", "0"], "bad --batch"),
        (["--batch", "two"], "bad --batch"),
        (["--count", "0"], "bad --count"),
        (["--trees", "oak"], "no such tree"),
        (["--peers", "ollama"], "unknown peer"),
        (["--lm-head", "rented"], "bad --lm-head"),
        (["--dtypes", ""], "nothing to compare"),
    ],
)
def test_bad_options_are_one_line(
    arguments: list[str],
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(*arguments, *options, "--out", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "out").exists()


def test_speed_up_is_the_median_over_repeats_of_the_same_repeats_ratio() -> None:
    settings = Settings(
        "b", "h", (Variant("int8", "rtn"),), (1,), ("auto",), ((1,),), 4, 3, "int8", "int8", "int8", "own"
    )
    results = Results.begin(settings)
    # The machine slows down threefold; the ratio within a repeat does not.
    for repeat, slow in enumerate((1.0, 2.0, 3.0)):
        parts = {"base": slow, "verify": 0.0, "heads": 0.0}
        results.runs.append(Run(PLAIN, "", 1, repeat, 100, slow, 100, parts, 1.0, [], 1.0))
        results.runs.append(Run("int8", "auto", 1, repeat, 100, slow / 1.5, 60, parts, 1.6, [0.4], 4.0))
    results.peers = [PeerRun("vllm", 1, 0, "vllm 1", 100, 2.0), PeerRun("vllm", 1, 1, "", error="gone")]
    plain, drafted, peer = rows_of(results)
    assert drafted["speedup"] == pytest.approx(1.5)
    assert (drafted["speedup_min"], drafted["speedup_max"]) == pytest.approx((1.5, 1.5))
    assert plain["tokens_per_second"] == 50.0
    assert drafted["base_ms_per_step"] == pytest.approx(2.0 / 60 * 1e3)
    assert (peer["tokens_per_second"], peer["repeats"]) == (50.0, 1)


def test_variants_float_dtypes_have_one_method_and_int8_its_own_scale() -> None:
    names = [variant.name for variant in variants_of("fp16,int8,int4", "rtn,gptq", 64)]
    assert names == ["fp16", "int8", "int8-gptq", "int4-g64", "int4-g64-gptq"]
    with pytest.raises(InputError):
        variants_of("int5", "rtn", None)


def test_a_text_that_is_too_short_differs_where_it_ends() -> None:
    class Numbers:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    check_identity("row", [[1, 2]], [[1, 2]], Numbers())
    with pytest.raises(VerifyError, match=r"prompt 0 differs .* at token 2"):
        check_identity("row", [[1, 2]], [[1, 2, 3]], Numbers())
