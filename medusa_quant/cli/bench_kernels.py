"""`medusa-quant bench-kernels`: time every kernel backend against its memory floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..kernels.bench import Result


def bench_kernels(
    shape: Annotated[
        list[str] | None, typer.Option(help="smollm2 | 7b | 13b | 33b | KxN; repeatable. Default 7b.")
    ] = None,
    m: Annotated[str, typer.Option("--m", help="Rows of activations, comma-separated.")] = "1,2,4,8,16,64",
    dtype: Annotated[str, typer.Option(help="Weight dtypes: int4,int8,nf4,bf16,fp16,fp32.")] = "int4,int8",
    activation_dtype: Annotated[str, typer.Option(help="fp32 | fp16 | bf16.")] = "bf16",
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot (needs matplotlib).")] = None,
) -> None:
    """Each backend and dense fp32/fp16/bf16: correctness checked against fp64 first, then the median of many
    runs on cold weights, and its ratio to the time memory needs to deliver the weight once."""
    import torch

    from ..kernels import bench

    try:
        rows = [int(part) for part in m.split(",")]
    except ValueError:
        raise InputError("bad --m", expected="numbers, as 1,2,4", found=m) from None
    if not rows or min(rows) < 1:
        raise InputError("bad --m", expected="numbers of at least 1", found=m)
    dtypes = [part.strip() for part in dtype.split(",")]
    known = ("int4", "int8", "nf4", *bench.DTYPES)
    for name in dtypes:
        if name not in known:
            raise InputError("unknown --dtype", expected=" | ".join(known), found=name)
    if activation_dtype not in bench.DTYPES:
        raise InputError(
            "unknown --activation-dtype", expected=" | ".join(bench.DTYPES), found=activation_dtype
        )
    if plot is not None:
        _require_matplotlib()
    shapes = [pair for text in shape or ["7b"] for pair in bench.parse_shape(text)]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA or ROCm device on this machine", fix="use --device cpu")
    results: list[Result] = []
    for pair in shapes:
        for result in bench.bench_shape(pair, rows, dtypes, bench.DTYPES[activation_dtype], where):
            results.append(result)
            if not as_json:
                _print_result(result, first=len(results) == 1, activation=activation_dtype)
    if as_json:
        report = {
            "device": str(where),
            "threads": torch.get_num_threads(),
            "activation_dtype": activation_dtype,
            "results": [result.as_dict() for result in results],
        }
        typer.echo(json.dumps(report, indent=1))
    if plot is not None:
        _plot(results, plot)


def _print_result(result: Result, first: bool, activation: str) -> None:
    if first:
        typer.echo(
            f"activations {activation}; floor: the weight's bytes at the read bandwidth measured around it"
        )
        typer.echo(
            f"{'K x N':>13} {'weight':>6} {'backend':>12} {'x':>13} "
            f"{'M':>4} {'error':>8} {'GB/s':>5} {'ms':>9} {'floor':>7} {'ratio':>6}"
        )
    timing = result.note
    if result.milliseconds is not None:
        timing = f"{result.bandwidth:5.1f} {result.milliseconds:9.3f} {result.floor:7.3f} {result.ratio:6.2f}"
    typer.echo(
        f"{f'{result.K}x{result.N}':>13} {result.weight_dtype:>6} {result.backend:>12} "
        f"{result.activation:>13} {result.M:>4} {result.error:8.1e} {timing}"
    )


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", fix="pip install matplotlib")


def _plot(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.milliseconds is not None:
            name = f"{result.K}x{result.N} {result.weight_dtype} {result.backend} {result.activation}"
            lines.setdefault(name, []).append((result.M, result.milliseconds))
    for name, points in lines.items():
        axes.loglog([m for m, _ in points], [ms for _, ms in points], marker="o", label=name)
    axes.set_xlabel("M (rows of activations)")
    axes.set_ylabel("ms (median, cold weights)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
