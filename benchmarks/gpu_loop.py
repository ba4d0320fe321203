"""The loop with captured steps against the loop without, on a random base: tokens, acceptance, speed.

python benchmarks/gpu_loop.py [--device cuda]    (on the CPU nothing is captured: it checks this script)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from draft_heads import save_heads
from tiny_models import build_model

from medusa_quant import load_heads
from medusa_quant.checkpoints.base import base_lm_head
from medusa_quant.runtime.batch import LlamaBatch
from medusa_quant.runtime.heads import DraftHeads
from medusa_quant.runtime.model import LlamaModel, load_base
from medusa_quant.runtime.request import Request, SamplingParams
from medusa_quant.runtime.speculation import Speculation

REQUESTS, TOKENS = 8, 100


def run(base: LlamaModel, heads: DraftHeads, graphs: bool) -> tuple[list[list[int]], float, float]:
    """Tokens of every request, mean acceptance length, and steps a second of a second, warm run."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 131, (5 + n,), generator=generator).tolist() for n in range(REQUESTS)]
    policy = Speculation.named("tree", "default", heads.num_heads)
    batch = LlamaBatch(base, heads, speculation=policy, graphs=graphs, max_batch=REQUESTS)
    for _ in range(2):
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        requests = [Request(str(n), prompt, params) for n, prompt in enumerate(prompts)]
        for request in requests:
            batch.add(request)
        started, steps = time.perf_counter(), 0
        while batch.has_work:
            batch.step()
            steps += 1
    rate = steps / (time.perf_counter() - started)
    return [request.generated for request in requests], batch.metrics.mean_acceptance_length, rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "base"
        build_model(model)
        base = load_base(model, "fp32", device=device)
        lm_head = base_lm_head(str(model)).dense()
        source = load_heads(save_heads(Path(folder) / "heads", 3, lm_head=lm_head, scale=0.02))
        heads = DraftHeads(source, base, "exact")
        plain, captured = run(base, heads, False), run(base, heads, True)
    same = sum(a == b for a, b in zip(plain[0], captured[0], strict=True))
    print(
        f"loop on {device}: {same} of {REQUESTS} texts equal, acceptance {plain[1]:.3f} and {captured[1]:.3f}"
    )
    print(f"steps a second: {plain[2]:.0f} without captured steps, {captured[2]:.0f} with")
    return int(same < REQUESTS)


if __name__ == "__main__":
    raise SystemExit(main())
