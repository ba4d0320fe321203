"""Draft heads for the tiny base of these tests, in every dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from medusa_quant import ConvertOptions, MedusaHeads, convert, load_heads

HIDDEN, VOCAB = 48, 131


def save_heads(
    folder: Path,
    num_heads: int = 3,
    num_layers: int = 1,
    lm_head: torch.Tensor | None = None,
    scale: float = 0.1,
) -> Path:
    """Format A (random LM matrices, or the given one in every head); scale 0 and nan are allowed."""
    generator = torch.Generator().manual_seed(11)
    hidden = HIDDEN if lm_head is None else lm_head.shape[1]
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shape = (hidden, hidden)
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(shape, generator=generator) * scale
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator) * scale
        matrix = torch.randn(VOCAB, HIDDEN, generator=generator) if lm_head is None else lm_head
        tensors[f"{head}.{num_layers}.weight"] = matrix.clone().float()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def converted(source: Path, dtype: str, tp: int = 1) -> MedusaHeads:
    """The heads after a conversion; int4 in groups of 32 (a short last group: H is 48)."""
    options = ConvertOptions(dtype=dtype, group_size=32 if dtype == "int4" else None, tp=tp)
    out = source.with_name(f"{source.name}-{dtype}-{tp}")
    convert(source, out, options, force=True)
    return load_heads(out)
