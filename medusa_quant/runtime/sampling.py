"""Drawing a token: temperature, top-k, top-p, and a random number that depends on seed and position only."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """fp64 [n, V] for logits [n, V]: softmax of logits / temperature, cut to the top_k likeliest (0: all)
    and to the smallest set whose mass reaches top_p, and renormalised. temperature > 0."""
    scaled = logits.double() / temperature
    if 0 < top_k < logits.shape[1]:
        least = scaled.topk(top_k, -1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    chances = torch.softmax(scaled, -1)
    if top_p < 1.0:
        ordered, index = torch.sort(chances, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        chances = torch.zeros_like(chances).scatter_(1, index, ordered)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def draw(chances: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens int64 [n] by inverse transform: chances [n, V], uniforms [n] in [0, 1)."""
    total = chances.cumsum(-1)
    wanted = uniforms.to(total).unsqueeze(1) * total[:, -1:]
    picked = torch.searchsorted(total, wanted, right=True).squeeze(1)
    # Rounding must not land on the tail of tokens with no chance.
    last = chances.shape[1] - 1 - (chances > 0).flip(1).to(torch.int8).argmax(1)
    return torch.minimum(picked, last)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one position of one request (SplitMix64, Steele et al. 2014).

    Counter-based: the same whatever the batch, the tree, or a preemption.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) / (1 << 53)
