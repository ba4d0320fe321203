"""Decoding speed of the base with and without heads, beside its floor and llama.cpp.

Every row runs the same prompts, greedy, in this process; llama.cpp (PyPI's llama-cpp-python, where
--peer-python names an interpreter that has it) runs them in a process of its own. Rows are repeated in
turn, so that a drift of the machine hits all of them, and medians are given.

    python benchmarks/decode.py BASE [--heads PATH ...] [--batch 1,8] [--tokens 128] [--prompts FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from medusa_quant import Engine, SamplingParams
from medusa_quant.calibration.prompts import read_prompts
from medusa_quant.kernels.timing import read_bandwidth
from medusa_quant.runtime.model import Segment, load_base, load_tokenizer

PEER = """
import json, sys, time
from llama_cpp import Llama
prompts, tokens, threads = json.load(open(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
model = Llama(sys.argv[1], n_ctx=2048, n_threads=threads, verbose=False, logits_all=False)
count, started = 0, time.perf_counter()
for prompt in prompts:
    model.reset()
    for number, _ in enumerate(model.generate(prompt, temp=0.0, reset=True), 1):
        count += 1
        if number == tokens:
            break
print(json.dumps({"tokens": count, "seconds": time.perf_counter() - started}))
"""


def main() -> None:
    args = _arguments()
    base = load_base(args.base, args.base_dtype, activation=args.base_activation)
    tokenizer = load_tokenizer(args.base)
    encoder = Engine(base, tokenizer=tokenizer, max_len=64)
    prompts = [
        encoder.encode_messages([{"role": role, "content": text} for role, text in prompt.messages])
        for prompt in read_prompts(args.prompts)
    ][: args.count]
    threads = torch.get_num_threads()
    print(f"{len(prompts)} prompts, {args.tokens} tokens each, base {args.base_dtype}, {threads} threads")
    _step_against_floor(base)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    rows: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    texts: dict[str, list[list[int]]] = {}
    for _ in range(args.repeats):
        for batch in (int(size) for size in args.batch.split(",")):
            for name, heads, mode in _variants(args):
                engine = Engine(
                    base, heads, tokenizer=tokenizer, speculation=mode, max_batch=batch, max_len=1024
                )
                started = time.perf_counter()
                outputs = engine.generate(prompts, params)
                seconds = time.perf_counter() - started
                key = f"batch {batch}, {name}"
                tokens = [output.token_ids for output in outputs]
                if texts.setdefault(f"batch {batch}", tokens) != tokens:
                    sys.exit(f"error: {key} gives another text than the first row")
                rows.setdefault(key, []).append(sum(map(len, tokens)) / seconds)
                metrics = engine.metrics
                notes[key] = f"acceptance {metrics.mean_acceptance_length:.3f}, {metrics.steps} steps"
        if args.peer_python:
            rows.setdefault("batch 1, llama.cpp", []).append(_peer(args, prompts))
    print("\n| run | tok/s | min - max | |\n|---|---:|---:|---|")
    for key, speeds in rows.items():
        spread = f"{min(speeds):.1f} - {max(speeds):.1f}"
        print(f"| {key} | {statistics.median(speeds):.1f} | {spread} | {notes.get(key, '')} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("--heads", nargs="*", default=[])
    parser.add_argument("--speculation", default="auto,tree")
    parser.add_argument("--base-dtype", default="int8")
    parser.add_argument("--base-activation", default="int8")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", default=str(Path(__file__).with_name("quantization_prompts.txt")))
    parser.add_argument("--count", type=int, default=8, help="prompts used")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peer-python", help="an interpreter with llama-cpp-python; the base must be a .gguf"
    )
    return parser.parse_args()


def _variants(args: argparse.Namespace) -> list[tuple[str, str | None, str]]:
    variants: list[tuple[str, str | None, str]] = [("plain", None, "off")]
    for heads in args.heads:
        variants += [(f"{Path(heads).name}, {mode}", heads, mode) for mode in args.speculation.split(",")]
    return variants


def _step_against_floor(base: Any) -> None:
    """One pass of the base at growing rows, beside reading its weights once."""
    linears = [linear for layer in base.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    size = sum(linear.nbytes for linear in linears) + base.lm_head.nbytes
    bandwidth = read_bandwidth(torch.device("cpu"))
    floor = size / bandwidth * 1e3
    print(
        f"weights {size / 1e6:.1f} MB, read bandwidth {bandwidth / 1e9:.1f} GB/s, floor {floor:.2f} ms a pass"
    )
    print("\n| rows | ms a pass | of which LM matrix | times the floor |\n|---:|---:|---:|---:|")
    cache = base.new_cache(1, 512)
    for rows in (1, 2, 3, 5, 8, 16, 32):
        tokens, places = torch.full((rows,), 100), torch.arange(100, 100 + rows)

        def layers(tokens: Any = tokens, places: Any = places, rows: int = rows) -> Any:
            return base.forward(tokens, places, [Segment(0, 100, rows)], cache)

        hidden = layers()
        first, second = _median(layers), _median(lambda hidden=hidden: base.logits(hidden))
        print(f"| {rows} | {first + second:.2f} | {second:.2f} | {(first + second) / floor:.2f} |")


def _median(run: Any, repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _peer(args: argparse.Namespace, prompts: list[list[int]]) -> float:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        command = [
            args.peer_python,
            "-c",
            PEER,
            args.base,
            file.name,
            str(args.tokens),
            str(torch.get_num_threads()),
        ]
        done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(done["tokens"]) / float(done["seconds"])


if __name__ == "__main__":
    main()
