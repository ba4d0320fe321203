"""`medusa-quant kernels`: what this machine can run, and what each shape would use."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..errors import InputError


def kernels(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="smollm2 | 7b | 13b | 33b | KxN; repeatable. Default smollm2, 7b."),
    ] = None,
    m: Annotated[int, typer.Option("--m", help="Rows of activations to choose for.")] = 1,
    activation_dtype: Annotated[str, typer.Option(help="fp32 | fp16 | bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Which backends and instruction sets this machine has, what each shape would use, and why."""
    import torch

    from ..kernels import bench, choose, dispatch, judge
    from ..kernels.backend import Problem
    from ..kernels.cpu.isa import available_isas, chosen_isa

    if activation_dtype not in bench.DTYPES:
        raise InputError(
            "unknown --activation-dtype", expected=" | ".join(bench.DTYPES), found=activation_dtype
        )
    if m < 1:
        raise InputError("bad --m", expected="at least 1", found=m)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    isas, isa = available_isas(), chosen_isa()
    backends = {name: dispatch.unavailable(name) for name in dispatch.backend_names()}
    choices: list[dict[str, Any]] = []
    for features, outputs in [
        pair for text in shape or ["smollm2", "7b"] for pair in bench.parse_shape(text)
    ]:
        for dtype in ("int4", "int8", "bf16", "fp32"):
            for mode in ("int8", "exact") if dtype.startswith("int") else ("exact",):
                problem = Problem(
                    where, bench.DTYPES[activation_dtype], mode, dtype,
                    128 if dtype == "int4" else -1, True, False, features, outputs, m,
                )  # fmt: skip
                backend, why = choose(problem)
                costs = {v.name: round(v.cost, 2) for v in judge(problem) if v.cost is not None}
                refused = {v.name: v.reason for v in judge(problem) if v.reason and not backends[v.name]}
                choices.append(
                    {"K": features, "N": outputs, "M": m, "weight": dtype, "activation": mode,
                     "backend": backend.name, "why": why, "cost": costs, "refused": refused}
                )  # fmt: skip
    if as_json:
        report = {
            "device": str(where), "isas": isas, "isa": isa, "threads": torch.get_num_threads(),
            "backends": {name: reason or "available" for name, reason in backends.items()},
            "choices": choices,
        }  # fmt: skip
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"device {where}, {torch.get_num_threads()} threads")
    typer.echo(f"CPU instruction sets: {', '.join(isas)} (using {isa})")
    for name, reason in backends.items():
        typer.echo(f"  {name:13} {reason or 'available'}")
    typer.echo(f"M {m}, {activation_dtype} activations; cost 1.0 = reading the weight once from memory")
    for choice in choices:
        listed = ", ".join(f"{name} {cost}" for name, cost in choice["cost"].items())
        typer.echo(
            f"  {choice['K']:>5} x {choice['N']:<6} {choice['weight']:5} x {choice['activation']:5} -> "
            f"{choice['backend']} ({choice['why']}: {listed})"
        )
        for name, refusal in choice["refused"].items():
            typer.echo(f"      not {name}: {refusal}")
