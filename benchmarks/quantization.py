"""The table of docs/quantization.md: what each dtype, group size and method costs in acceptance.

    python benchmarks/quantization.py BASE HEADS --calibration STATS [--held-out STATS] [--out FILE]

Format B heads are expanded with the base's LM matrix first, so that ResBlocks and LM matrices are both
quantized. Every row is judged on the held-out states of --held-out (default: those of --calibration).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from medusa_quant.calibration import CalibratedQuantizer, Report, Statistics, evaluate, held_out
from medusa_quant.calibration.acceptance import accepted_lengths, greedy_chain
from medusa_quant.calibration.gate import draft_tree
from medusa_quant.checkpoints import MedusaHeads, load_heads
from medusa_quant.checkpoints.base import base_lm_head, check_fits, with_own_lm_heads
from medusa_quant.checkpoints.heads import BIAS
from medusa_quant.plan import ConvertOptions, make_plan
from medusa_quant.quantization import QuantizedWeight
from medusa_quant.stages import plain_quantizer

HEADER = (
    "| weights | method | MB | relative error of logits | KL | top-1 agreement per head | "
    "predicted acceptance (tree) | of fp16 | greedy chain | of fp16 | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    statistics = Statistics.load(arguments.calibration)
    judged = Statistics.load(arguments.held_out) if arguments.held_out else statistics
    heads = load_heads(arguments.heads)
    if heads.shared_lm_head:
        base = base_lm_head(arguments.base)
        check_fits(heads, base)
        matrix = base.load()
        heads = with_own_lm_heads(heads, replace(base, load=lambda: matrix))
    data = held_out(judged, heads.num_heads, arguments.states)
    tree = draft_tree(heads.num_heads)
    lines = [
        f"{statistics.tokens} calibration states, {data.states.shape[0]} held-out states, "
        f"tree of {len(tree)} nodes, {arguments.threads} thread(s).",
        "",
        HEADER,
    ]
    print("\n".join(lines), flush=True)
    for dtype, group_size, method, low_rank in _rows(arguments.only):
        options = ConvertOptions(
            dtype=dtype,
            group_size=group_size,
            method=method,
            low_rank=low_rank,
            calibration=arguments.calibration,
        )
        started = time.perf_counter()
        quantized, size = _quantize(heads, options, statistics)
        seconds = time.perf_counter() - started
        report = evaluate(quantized, data, tree, heads)
        lines.append(_line(options, report, size, seconds, heads.num_heads))
        print(lines[-1], flush=True)
    if arguments.out:
        Path(arguments.out).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("heads")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--held-out")
    parser.add_argument("--states", type=int, help="judge on this many held-out states only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", default=[], help="rows such as int4/64/gptq")
    parser.add_argument("--out")
    return parser.parse_args()


def _rows(only: list[str]) -> list[tuple[str, int | None, str, int]]:
    rows: list[tuple[str, int | None, str, int]] = [("fp16", None, "rtn", 0)]
    rows.append(("int8", -1, "rtn", 0))
    for group_size in (128, 64, 32):
        rows += [("int4", group_size, method, 0) for method in ("rtn", "mse", "gptq")]
        rows.append(("int4", group_size, "gptq", 16))
    return [row for row in rows if not only or "/".join(str(part) for part in row[:3]) in only]


def _quantize(heads: MedusaHeads, options: ConvertOptions, statistics: Statistics) -> tuple[MedusaHeads, int]:
    """The heads as `convert` would store them, and their bytes."""
    plan = make_plan(heads, options)
    quantizer = CalibratedQuantizer(plan.heads, statistics, options.low_rank)
    plain = options.method == "rtn"
    tensors, size = dict(plan.heads.tensors), 0
    for planned in plan.tensors:
        tensor = planned.tensor
        if planned.scheme is None:
            dtype = torch.float16
            value = tensor.dense().to(dtype)
        else:
            weight = tensor.load()
            assert isinstance(weight, torch.Tensor)
            value, _ = (plain_quantizer if plain else quantizer)(weight, planned)
        size += value.nbytes
        quantized = isinstance(value, QuantizedWeight)
        tensors[tensor.id] = replace(
            tensor, dtype=planned.dtype if quantized else "fp16", load=lambda value=value: value
        )
    assert all(tensor.id.role == BIAS or tensor.dtype == options.dtype for tensor in tensors.values())
    return replace(plan.heads, tensors=tensors), size


def _line(options: ConvertOptions, report: Report, size: int, seconds: float, num_heads: int) -> str:
    chain = greedy_chain(num_heads)
    own, source = (
        float(accepted_lengths(r, chain).double().mean()) for r in (report.ranks, report.source_ranks)
    )
    name = options.dtype or ""
    if options.group_size not in (None, -1):
        name += f" g{options.group_size}"
    method = "-" if options.dtype == "fp16" else options.method
    if options.low_rank:
        method += f" + rank {options.low_rank}"
    errors = max(score.output_error or 0.0 for score in report.heads)
    kl = max(score.kl or 0.0 for score in report.heads)
    agreement = " ".join(f"{score.agreement[1]:.3f}" for score in report.heads if score.agreement)
    return (
        f"| {name} | {method} | {size / 1e6:.1f} | {errors:.4f} | {kl:.4f} | {agreement} | "
        f"{report.acceptance:.4f} | {report.acceptance_ratio:.2%} | {own:.4f} | {own / source:.2%} | "
        f"{seconds:.1f} |"
    )


if __name__ == "__main__":
    main()
