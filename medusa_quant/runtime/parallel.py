"""Base and heads on every rank: loading them together, and the ranks that only repeat rank 0's calls."""

from __future__ import annotations

from pathlib import Path

from .heads import DraftHeads
from .model import KVCache, LlamaModel, load_base
from .rank_heads import heads_of_rank
from .ranks import ALONE, Ranks


def load_pair(
    base: str | Path,
    heads: str | Path | None,
    *,
    base_dtype: str = "fp32",
    base_activation: str = "int8",
    heads_activation: str = "int8",
    device: str = "cpu",
    ranks: Ranks = ALONE,
) -> tuple[LlamaModel, DraftHeads | None]:
    """This rank's share of both. Where one rank cannot load its share all ranks end, one with the reason."""
    with ranks.agreed():
        model = load_base(base, base_dtype, activation=base_activation, device=device, ranks=ranks)
        if heads is None:
            return model, None
        share, split = heads_of_rank(heads, ranks)
        return model, DraftHeads(share, model, heads_activation, lm_head_split=split)


def follow(model: LlamaModel, heads: DraftHeads | None, ranks: Ranks) -> None:
    """Repeat on this rank's shards what rank 0 does, until it ends. Raises RankLostError if it just dies."""
    caches: dict[int, KVCache] = {}
    while (heard := ranks.hear()) is not None:
        name, arguments = heard
        if name == "new_cache":
            cache = model.new_cache(*arguments)
            caches[cache.number] = cache
        elif name == "forward":
            tokens, positions, segments, number = arguments
            model.forward(tokens, positions, segments, caches[number])
        elif name == "compact":
            number, *path = arguments
            model.compact(caches[number], *path)
        elif name == "logits":
            model.logits(*arguments)
        else:
            assert heads is not None, name
            heads.guess(*arguments)
