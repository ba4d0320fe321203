"""`medusa-quant train`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .options import BaseActivationOption, BaseArgument, BaseDtypeOption, ForceOption, JsonOption
from .output import count_progress, notes, print_json, print_table, print_warnings

if TYPE_CHECKING:
    from ..training.trainer import Accuracy


def train(
    base: BaseArgument,
    out: Annotated[Path, typer.Option(help="Folder for the heads (format A or B, fp16).")],
    heads: Annotated[int, typer.Option(help="Heads to train.")] = 4,
    layers: Annotated[int, typer.Option(help="ResBlocks per head.")] = 1,
    lm_head: Annotated[
        str, typer.Option(help="shared: the base's LM matrix (format B). own: one per head, trained.")
    ] = "shared",
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A .txt or .jsonl file, or -. [2,400 built from templates]"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens the base writes to train on.")] = 400_000,
    max_new_tokens: Annotated[int, typer.Option(help="Longest text per prompt.")] = 256,
    init: Annotated[Optional[str], typer.Option(help="Heads to start from.")] = None,  # noqa: UP045
    qat: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="int4 or int8: train through weights quantized as `convert` does."),
    ] = None,
    group_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of --qat: 32, 64, 128 or -1. [int8: -1, int4: 128]"),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(help="ce: the token written. kl: the base's ten likeliest. teacher: what --init says."),
    ] = "ce",
    epochs: Annotated[int, typer.Option(help="Passes over the text.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Hidden states a step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 1e-3,
    dtype: Annotated[str, typer.Option(help="Of the matrix products: bf16 or fp32.")] = "bf16",
    base_dtype: BaseDtypeOption = "int8",
    base_activation: BaseActivationOption = "int8",
    cache: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of the base's text and states, kept and reused. [OUT.cache]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Order of prompts and rows, and draws.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Self-distillation: the base writes its own training text (half greedy, half at temperature 0.7), and
    heads learn it. The loss looks at the tokens of that text only. An interrupted run continues."""
    from ..calibration.collect import encode_prompts
    from ..calibration.prompts import Prompt, read_prompts
    from ..checkpoints import load_heads
    from ..checkpoints.base import base_lm_head
    from ..errors import InputError
    from ..quantization import Scheme
    from ..quantization.scheme import INT_DTYPES
    from ..runtime.model import load_base, load_tokenizer
    from ..training.corpus import CorpusOptions, write_corpus
    from ..training.heads import TrainableHeads, save_heads
    from ..training.prompts import MAX_PROMPTS, default_prompts
    from ..training.trainer import TrainOptions, accuracy, seen_vocabulary
    from ..training.trainer import train as run
    from ..workspace.atomic import occupied

    for name, value, allowed in (
        ("--lm-head", lm_head, ("shared", "own")),
        ("--loss", loss, ("ce", "kl", "teacher")),
        ("--dtype", dtype, ("bf16", "fp32")),
        ("--qat", qat, (None, *INT_DTYPES)),
    ):
        if value not in allowed:
            raise InputError(f"bad {name}", expected=" | ".join(filter(None, allowed)), found=value)
    for name, count in (
        ("--heads", heads),
        ("--layers", layers),
        ("--tokens", tokens),
        ("--epochs", epochs),
        ("--batch-size", batch_size),
        ("--max-new-tokens", max_new_tokens),
    ):
        if count < 1:
            raise InputError(f"bad {name}", expected="1 or more", found=count)
    if loss == "teacher" and init is None:
        raise InputError("--loss teacher learns from other heads", fix="pass --init HEADS")
    if qat is None and group_size is not None:
        raise InputError("--group-size belongs to --qat", fix="pass --qat int4")
    if occupied(out) and not force:
        raise InputError("the target exists and is not empty", file=out, fix="pass --force to replace it")
    scheme = None if qat is None else Scheme.for_dtype(qat, group_size)
    initial = None if init is None else load_heads(init)
    matrix = base_lm_head(base).dense()
    started = time.monotonic()
    tokenizer, model = load_tokenizer(base), load_base(base, base_dtype, activation=base_activation)
    given = (
        [Prompt((("user", text),)) for text in default_prompts(MAX_PROMPTS, seed)]
        if prompts is None
        else read_prompts(prompts)
    )
    context = model.config.max_position_embeddings
    encoded, warnings = encode_prompts(tokenizer, given, max_new_tokens, context)
    print_warnings(warnings)
    folder = cache or out.with_name(out.name + ".cache")
    corpus_options = CorpusOptions(tokens, max_new_tokens, seed=seed)
    with count_progress() as show:
        corpus = write_corpus(
            model,
            encoded,
            corpus_options,
            folder,
            f"{base} {base_dtype}",
            lambda done, total: show(done, total, "tokens written by the base"),
        )
    written = time.monotonic() - started
    if corpus.chosen.numel() < tokens:
        found = f"{corpus.chosen.numel():,} tokens of the {tokens:,} asked for"
        print_warnings([f"{len(encoded)} prompts gave {found}: give more, or a longer --max-new-tokens"])
    del model
    vocabulary = seen_vocabulary(corpus)
    module = TrainableHeads(heads, layers, matrix[vocabulary].float(), lm_head == "own", scheme)
    teacher = None
    if initial is not None:
        module.start_from(initial, vocabulary)
        if loss == "teacher":
            teacher = TrainableHeads(heads, layers, matrix[vocabulary].float(), lm_head == "own", None)
            teacher.start_from(initial, vocabulary)
    options = TrainOptions(epochs, batch_size, learning_rate, loss, dtype, seed)
    before = accuracy(module, corpus, vocabulary, dtype)
    started = time.monotonic()
    checkpoint = folder / f"{out.name}.checkpoint"
    with count_progress() as show:
        run(
            module,
            corpus,
            vocabulary,
            options,
            checkpoint,
            lambda done, total, value: show(done, total, f"steps, loss {value:.3f}"),
            teacher,
        )
    trained = time.monotonic() - started
    after = accuracy(module, corpus, vocabulary, dtype)
    config: dict[str, object] = {"base_model_name_or_path": str(base)}
    save_heads(module, out, matrix, vocabulary, config, initial)
    checkpoint.unlink(missing_ok=True)
    summary = {
        "out": str(out),
        "states": corpus.chosen.numel(),
        "vocabulary": vocabulary.numel(),
        "held_out_rows": after.rows,
        "seconds_writing": round(written, 1),
        "seconds_training": round(trained, 1),
        "before": {"top1": before.top1, "top5": before.top5},
        "after": {"top1": after.top1, "top5": after.top5},
        "cache": str(folder),
    }
    if as_json:
        print_json(summary)
        return
    print_table(
        f"accuracy on {after.rows:,} held-out states, {vocabulary.numel():,} tokens of the text"
        + ("" if qat is None else f", seen through {qat}"),
        ("head", "top-1", "before", "top-5", "before "),
        _rows(before, after),
        right="top-1 before top-5 before ",
    )
    typer.echo(
        f"{out}: {heads} heads, trained on {corpus.chosen.numel():,} tokens "
        f"({written:.0f} s to write them, {trained:.0f} s to train)"
    )
    notes.print(f"text and states are kept for further runs: {folder}", markup=False)


def _rows(before: Accuracy, after: Accuracy) -> list[tuple[str, ...]]:
    columns = (after.top1, before.top1, after.top5, before.top5)
    return [(str(head), *(f"{column[head]:.3f}" for column in columns)) for head in range(len(after.top1))]
