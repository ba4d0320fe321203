"""What can be checked of the GPU set without a GPU: imports, arguments, and every kernel compiled."""

from __future__ import annotations

import argparse
from pathlib import Path

import gpu_bench
import gpu_check
import torch
from gpu_shapes import FORMS, Shape, dense, random_weight

from medusa_quant.kernels.triton.compiled import (
    TARGETS,
    Report,
    compile_second_stages,
    compile_variant,
    shipped_variants,
)

_HEADER = (
    "| target | kernel | x | M to | shared KB | registers | matrix | int to float | spills |",
    "|---|---|---|---:|---:|---:|---:|---:|---:|",
)


def check_weights() -> None:
    """The random weights of the set are well-formed and dequantize to finite values."""
    for form in FORMS:
        weight = random_weight(Shape("tiny", 2, 192, 40), form, "cpu")
        values = dense(weight, torch.float32)
        if values.shape != (2, 192, 40) or not bool(values.isfinite().all()):
            raise SystemExit(f"random weight {form.name} is malformed")


def compile_table() -> tuple[list[str], list[str]]:
    """Markdown rows of every shipped kernel on every target, and the rules broken."""
    lines, problems = list(_HEADER), []
    for arch in TARGETS:
        for variant in shipped_variants(arch):
            report = compile_variant(variant)
            extra = [f"g{variant.group_size}" if variant.group_size > 0 else "per channel"]
            extra += ["asym"] * variant.zeros + ["bias+SiLU+residual"] * variant.resblock
            extra += [f"split-K {variant.split_k}"] * (variant.split_k > 1)
            extra += [f"top-{variant.top_k}"] * bool(variant.top_k)
            name = f"{variant.kind} {' '.join(extra)}"
            bucket = "any" if variant.dtype == "fp32" else str(variant.bucket)
            lines.append(_row(arch, name, variant.dtype, bucket, report))
            found = report.problems(arch, variant)
            problems += [f"{arch} {name}: {problem}" for problem in found]
        for name, report in compile_second_stages(arch).items():
            lines.append(_row(arch, name, "fp16", "any", report))
            problems += [f"{arch} {name}: {problem}" for problem in report.problems(arch)]
    return lines, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    for module in (gpu_check, gpu_bench):
        if not callable(module.main):
            raise SystemExit(f"{module.__name__} has no main")
    check_weights()
    lines, problems = compile_table()
    arguments.output.write_text("\n".join(lines) + "\n")
    print(f"dry run: {len(lines) - len(_HEADER)} kernels compiled, table in {arguments.output}")
    if problems:
        raise SystemExit("\n".join(problems))


def _row(arch: str, name: str, dtype: str, bucket: str, report: Report) -> str:
    return (
        f"| {arch} | {name} | {dtype} | {bucket} | {report.shared / 1024:.1f} | {report.registers} "
        f"| {report.matrix} | {report.int_to_float} | {report.spills} |"
    )


if __name__ == "__main__":
    main()
