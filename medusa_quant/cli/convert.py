"""`medusa-quant convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .evaluate import print_report
from .mixed import choose_dtypes, read_plan
from .options import ForceOption, JsonOption, MinAcceptanceOption, MinAgreementOption, SourceArgument
from .output import byte_progress, notes, print_json, print_table, print_warnings, size

if TYPE_CHECKING:
    from ..conversion import ConvertResult
    from ..plan import Choice, Plan


def convert(
    source: SourceArgument,
    out: Annotated[Optional[Path], typer.Option("--out", help="Target folder.")] = None,  # noqa: UP045
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="fp32, fp16, bf16, int8, int4 or auto. A converted folder keeps its own by default."
        ),
    ] = None,
    group_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="32, 64, 128, or -1 for one scale per output channel. [int8: -1, int4: 128]"),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without or with zero points.")
    ] = True,
    full_range: Annotated[
        bool,
        typer.Option("--full-range", help="Symmetric codes down to -8 (-128); the extreme value is exact."),
    ] = False,
    method: Annotated[
        str,
        typer.Option(help="rtn: round to nearest. mse: clip search. awq-clip, gptq: need --calibration."),
    ] = "rtn",
    calibration: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Statistics of the base's states (`calibrate`): used, and judged by at the end."),
    ] = None,
    budget_mb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="--dtype auto: all matrices within this many MB, at the least loss."),
    ] = None,
    max_acceptance_loss: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="--dtype auto: as small as a loss of this share of acceptance allows."),
    ] = None,
    plan_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plan", help="A JSON file with a dtype for each head and matrix."),
    ] = None,
    low_rank: Annotated[
        int, typer.Option(help="Rank of an fp16 correction beside the codes; needs --calibration.")
    ] = 0,
    min_agreement: MinAgreementOption = None,
    min_acceptance_ratio: MinAcceptanceOption = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    lm_head_split: Annotated[
        str, typer.Option(help="How ranks share LM matrices: vocab or hidden.")
    ] = "vocab",
    layout: Annotated[str, typer.Option(help="turbomind, safetensors, hf, vllm or gptq.")] = "turbomind",
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Base model: gives format B heads their LM matrix, and is checked against."),
    ] = None,
    dedupe_lm_head: Annotated[
        bool, typer.Option("--dedupe-lm-head", help="Leave LM matrices equal to the base's to the base.")
    ] = False,
    on_overflow: Annotated[str, typer.Option(help="Values beyond fp16: error, or clip.")] = "error",
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Keep NaN and Inf in float dtypes.")
    ] = False,
    gptq_format: Annotated[str, typer.Option(help="Layout gptq: gptq (v1) or gptq_v2.")] = "gptq",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """SOURCE may be any Medusa checkpoint, or a folder this tool wrote: that one is re-sharded or given
    another layout with the same codes, bit for bit."""
    from ..checkpoints import load_heads
    from ..conversion import convert as run
    from ..errors import InputError
    from ..plan import ConvertOptions, make_plan

    if out is None and not dry_run:
        raise InputError("no target", fix="pass --out DIR, or --dry-run")
    automatic = dtype is not None and dtype.lower() == "auto"
    if not automatic and (budget_mb is not None or max_acceptance_loss is not None):
        raise InputError("the limit is for --dtype auto", fix="pass --dtype auto")
    choices: tuple[Choice, ...] = ()
    if plan_file is not None:
        if dtype is not None:
            raise InputError("--plan names every dtype", fix="drop --dtype")
        dtype, choices = read_plan(plan_file)
    options = ConvertOptions(
        dtype="fp16" if automatic else dtype,
        choices=choices,
        group_size=group_size,
        symmetric=symmetric,
        full_range=full_range,
        method=method.lower(),
        tp=tp,
        lm_head_split=lm_head_split.lower(),
        layout=layout.lower(),
        base=base,
        dedupe_lm_head=dedupe_lm_head,
        on_overflow=on_overflow.lower(),
        allow_nonfinite=allow_nonfinite,
        gptq_format=gptq_format.lower(),
        calibration=calibration,
        low_rank=low_rank,
    )
    if calibration is None and (min_agreement is not None or min_acceptance_ratio is not None):
        raise InputError("the gate judges by held-out states", fix="pass --calibration STATS")
    heads = load_heads(source)
    chosen: dict[str, object] = {}
    if automatic:
        options, chosen["mixed"] = choose_dtypes(heads, options, budget_mb, max_acceptance_loss, as_json)
    if dry_run:
        plan = make_plan(heads, options)
        print_warnings(plan.warnings)
        print_json({**plan.as_dict(), **chosen}) if as_json else _print_plan(plan)
        return
    assert out is not None
    report = None
    with byte_progress() as progress:
        if calibration is None:
            result = run(heads, out, options, force=force, progress=progress)
        else:
            from ..calibration.calibrated import convert_calibrated
            from ..calibration.gate import Gate

            gate = Gate(min_agreement, min_acceptance_ratio)
            result, report = convert_calibrated(heads, out, options, gate, force=force, progress=progress)
    print_warnings(result.plan.warnings)
    if as_json:
        print_json({**_summary(result), **chosen})
        return
    _print_summary(result)
    if report is not None:
        print_report(report)


def _print_plan(plan: Plan) -> None:
    rows = [
        (r["source"], r["from"], r["method"], r["name"], r["shape"], r["dtype"], _split(r), f"{r['bytes']:,}")
        for r in plan.rows()
    ]
    print_table(
        f"{plan.heads.format}: {plan.heads.num_heads} heads, L {plan.heads.num_layers}, "
        f"H {plan.heads.hidden_size}, V {plan.heads.vocab_size or 'of the base'} -> {plan.options.dtype}, "
        f"tp {plan.options.tp}, layout {plan.layout.name}",
        ("source", "from", "method", "stored as", "shape", "dtype", "split", "bytes"),
        rows,
        right="bytes",
    )
    typer.echo(_total(plan, plan.bytes))


def _split(row: dict[str, object]) -> str:
    return f"{row['split']} {row['start']}:{row['stop']}"


def _total(plan: Plan, written: int) -> str:
    ratio = written / plan.fp16_bytes if plan.fp16_bytes else 0.0
    return f"total {size(written)}, {ratio:.1%} of fp16 ({size(plan.fp16_bytes)})"


def _summary(result: ConvertResult) -> dict[str, object]:
    written = sum(entry.bytes for entry in result.manifest.files)
    errors = [entry.error for entry in result.manifest.files]
    return {
        "folder": str(result.folder),
        "files": len({entry.file for entry in result.manifest.files}),
        "bytes": written,
        "fp16_bytes": result.plan.fp16_bytes,
        "max_relative_error": max(error["relative"] for error in errors),
        "max_error": max(error["max"] for error in errors),
        "warnings": result.plan.warnings,
        "report": result.manifest.report,
    }


def _print_summary(result: ConvertResult) -> None:
    written = sum(entry.bytes for entry in result.manifest.files)
    worst = max(result.manifest.files, key=lambda entry: entry.error["relative"])
    count = len({entry.file for entry in result.manifest.files})
    typer.echo(f"{result.folder}: {count} files, {_total(result.plan, written)}")
    if worst.error["relative"]:
        typer.echo(f"largest relative error {worst.error['relative']:.3g} ({worst.tensor_id})")
    notes.print(f"check it any time: medusa-quant verify {result.folder}", markup=False)
