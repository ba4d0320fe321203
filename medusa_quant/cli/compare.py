"""`medusa-quant compare`."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .options import BaseActivationOption, BaseArgument, BaseDtypeOption, HeadsActivationOption, JsonOption
from .output import count_progress, print_json, print_table, print_warnings


def compare(
    base: BaseArgument,
    heads: Annotated[str, typer.Argument(help="Draft heads: a checkpoint or a converted folder.")],
    out: Annotated[Path, typer.Option(help="Folder for heads, results.json, rows.csv and report.html.")],
    dtypes: Annotated[str, typer.Option(help="Of the heads, separated by commas.")] = "fp16,int8,int4",
    methods: Annotated[str, typer.Option(help="Of integer dtypes: rtn, mse, awq-clip, gptq.")] = "rtn",
    group_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of int4: 32, 64, 128 or -1. [128]"),
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests running together; several by commas.")] = "1",
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A .txt or .jsonl file, or -. [24 shipped ones]"),
    ] = None,
    count: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Use the first so many prompts. [all]"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens written for each prompt.")] = 128,
    trees: Annotated[
        str, typer.Option(help="auto (chosen per step), chain, default, deep or files; by commas.")
    ] = "auto",
    repeats: Annotated[int, typer.Option(help="Of every row, in turn.")] = 3,
    lm_head: Annotated[
        str, typer.Option(help="Heads without LM matrices: own gives each one, shared uses the base's.")
    ] = "own",
    calibration: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Statistics of `calibrate`. [collected over shipped prompts]"),
    ] = None,
    base_dtype: BaseDtypeOption = "int8",
    base_activation: BaseActivationOption = "int8",
    heads_activation: HeadsActivationOption = "int8",
    peers: Annotated[
        str, typer.Option(help="llama.cpp, transformers, vllm: run beside ours, where installed.")
    ] = "",
    peer_python: Annotated[str, typer.Option(help="Interpreter that has the peers.")] = sys.executable,
    force: Annotated[bool, typer.Option("--force", help="Start anew where OUT holds results.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Every row writes the same prompts greedily, in turn with plain decoding, so that a drift of the machine
    hits all alike; text that differs from plain decoding's ends it with exit code 1. An interrupted run goes
    on where it stopped."""
    from ..calibration.collect import encode_prompts
    from ..calibration.prompts import PROMPTS, read_prompts
    from ..comparison.compare import RESULTS
    from ..comparison.compare import compare as run
    from ..comparison.peers import check_peers
    from ..comparison.report import report_html
    from ..comparison.settings import Settings, counts, file_names_differ, split, variants_of
    from ..comparison.summary import write_csv
    from ..errors import InputError
    from ..plan import METHODS
    from ..runtime.model import load_tokenizer, open_base
    from ..runtime.tree import named_tree

    named_peers = split(peers)
    check_peers(named_peers)
    for method in split(methods):
        if method not in METHODS:
            raise InputError("bad --methods", expected=" | ".join(METHODS), found=method)
    if count is not None and count < 1:
        raise InputError("bad --count", expected="1 or more", found=count)
    for tree in split(trees):
        if tree != "auto":
            named_tree(tree, 1)
    if not file_names_differ(split(trees)):
        raise InputError("two trees have the same name", found=trees)
    given = read_prompts(prompts or PROMPTS)[:count]
    tokenizer = load_tokenizer(base)
    context = open_base(base)[0].max_position_embeddings
    encoded, warnings = encode_prompts(tokenizer, given, tokens, context)
    settings = Settings(
        base,
        heads,
        variants_of(dtypes, methods, group_size),
        counts("--batch", batch),
        tuple(split(trees)),
        tuple(map(tuple, encoded)),
        tokens,
        repeats,
        base_dtype,
        base_activation,
        heads_activation,
        lm_head,
    )
    if max(settings.batches) > len(encoded):
        warnings.append(f"{len(encoded)} prompts cannot fill a batch of {max(settings.batches)}")
    print_warnings(warnings)
    if force:
        (out / RESULTS).unlink(missing_ok=True)
        shutil.rmtree(out / "heads", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    with count_progress() as progress:
        results, rows = run(settings, tokenizer, out, calibration, named_peers, peer_python, progress)
    write_csv(out / "rows.csv", rows)
    if find_spec("matplotlib") is None:
        print_warnings(["no report.html: pip install 'medusa-quant[report]'"])
    else:
        (out / "report.html").write_text(report_html(results, rows), encoding="utf-8")
    print_warnings([f"{run.peer}, batch {run.batch}: {run.error}" for run in results.peers if run.error])
    if as_json:
        print_json({"rows": rows, "out": str(out)})
        return
    print_table(
        f"{len(encoded)} prompts, {tokens} tokens each, base {base_dtype}; medians of {repeats}",
        _COLUMNS,
        [_cells(row) for row in rows],
        right=" ".join(_COLUMNS[1:]),
    )
    typer.echo("every row wrote the text of plain greedy decoding")
    typer.echo(str(out / ("report.html" if (out / "report.html").exists() else RESULTS)))


_COLUMNS = ("heads", "batch", "tok/s", "speed-up", "spread", "acceptance", "heads-ms", "MB", "agreement")


def _cells(row: dict[str, Any]) -> list[str]:
    name = ", ".join(part for part in (row["variant"], row["tree"]) if part)
    cells = [name, str(row["batch"]), f"{row['tokens_per_second']:.1f}"]
    if "speedup" not in row:
        return [*cells, *["-"] * 6]
    agreement = row["min_agreement"]
    return [
        *cells,
        f"{row['speedup']:.2f}",
        f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}",
        f"{row['acceptance_length']:.3f}",
        f"{row['heads_ms_per_step']:.2f}",
        f"{row['bytes'] / 1e6:.1f}",
        "-" if agreement is None else f"{agreement:.3f}",
    ]
