"""One process of a torchrun launch: greedy tokens of many cases, written by rank 0 as JSON.

python -m torch.distributed.run --nproc-per-node 2 rank_worker.py cases.json found.json
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from medusa_quant import SamplingParams
from medusa_quant.runtime.batch import LlamaBatch
from medusa_quant.runtime.parallel import follow, load_pair
from medusa_quant.runtime.ranks import Ranks, joined
from medusa_quant.runtime.request import Request
from medusa_quant.runtime.speculation import Speculation


def generate(base: str, heads: str, prompts: list[list[int]], ranks: Ranks) -> dict[str, Any]:
    """Tokens by greedy decoding with a tree, and how many were accepted a step; empty on ranks above 0."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, draft = load_pair(base, heads, ranks=ranks)
    if not ranks.leads:
        follow(model, draft, ranks)
        return {}
    assert draft is not None
    batch = LlamaBatch(
        model,
        draft,
        speculation=Speculation.named("tree", "default", draft.num_heads),
        max_batch=len(prompts),
        max_len=64,
    )
    requests = [Request(str(n), prompt, SamplingParams(max_tokens=12)) for n, prompt in enumerate(prompts)]
    for request in requests:
        batch.add(request)
    while batch.has_work:
        batch.step()
    ranks.end()
    return {
        "tokens": [request.generated for request in requests],
        "acceptance_length": batch.metrics.mean_acceptance_length,
        "heads_bytes": draft.nbytes,
        "warnings": [str(warning.message) for warning in caught],
    }


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    with joined() as ranks:
        found = [generate(*case, ranks) for case in cases]
        if ranks.leads:
            Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
