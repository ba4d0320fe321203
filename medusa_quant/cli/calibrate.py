"""`medusa-quant calibrate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import BaseArgument, BaseDtypeOption, JsonOption
from .output import count_progress, print_json, print_warnings, size


def calibrate(
    base: BaseArgument,
    out: Annotated[Path, typer.Option(help="Statistics file to write (safetensors).")],
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A .txt or .jsonl file, or - for standard input. [96 shipped ones]"),
    ] = None,
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Hidden states to collect. [all the prompts give]"),
    ] = None,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate/--no-generate",
            help="The base's own greedy continuations, as heads see them; or the prompts' own tokens.",
        ),
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(help="Longest continuation.")] = 256,
    base_dtype: BaseDtypeOption = "fp32",
    batch_size: Annotated[int, typer.Option(help="Prompts run together.")] = 16,
    seed: Annotated[int, typer.Option(help="Chooses held-out prompts and sampled states.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """One prompt in four is held out, to judge quantized heads by. An interrupted run leaves OUT.partial,
    and the same command continues it."""
    from ..calibration.collect import CollectOptions, base_identity, collect
    from ..calibration.prompts import CALIBRATION_PROMPTS, read_prompts
    from ..errors import InputError
    from ..runtime.model import load_base, load_tokenizer

    options = CollectOptions(tokens, max_new_tokens, generate, seed, batch_size)
    if out.is_dir():
        raise InputError("the target is a folder", file=out, expected="a file name")
    if out.exists() and not force:
        raise InputError("the target exists", file=out, fix="pass --force to replace it")
    parsed = read_prompts(CALIBRATION_PROMPTS if prompts is None else prompts)
    tokenizer, model = load_tokenizer(base), load_base(base, dtype=base_dtype, activation="exact")
    identity = base_identity(base, model, base_dtype)
    partial = out.with_name(out.name + ".partial")
    started = time.monotonic()
    with count_progress() as show:
        result = collect(
            model,
            tokenizer,
            parsed,
            options,
            partial,
            identity,
            lambda done, total, rate: show(done, total, f"states, {rate:,.0f} tokens/s"),
        )
    result.statistics.save(out)
    partial.unlink(missing_ok=True)
    seconds, stats = time.monotonic() - started, result.statistics
    warnings = list(result.warnings)
    if not stats.held_tokens:
        warnings.append("nothing was held out (a single prompt): these statistics cannot judge heads")
    if stats.tokens < stats.hidden_size:
        warnings.append(
            f"{stats.tokens} calibration states for H {stats.hidden_size}: gptq wants several times H"
        )
    print_warnings(warnings)
    collected = stats.tokens + stats.held_tokens
    summary = {
        "out": str(out),
        "prompts": stats.prompts,
        "calibration_states": stats.tokens,
        "held_out_states": stats.held_tokens,
        "resumed_from": result.resumed,
        "seconds": round(seconds, 2),
        "tokens_per_second": round((collected - result.resumed) / max(seconds, 1e-9), 1),
        "bytes": out.stat().st_size,
        "warnings": warnings,
    }
    if as_json:
        print_json(summary)
        return
    typer.echo(
        f"{out}: {collected} states of {stats.prompts} prompts ({stats.held_tokens} held out), "
        f"{summary['tokens_per_second']} tokens/s, {size(out.stat().st_size)}"
    )
