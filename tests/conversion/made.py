"""Checkpoints made for the conversion's tests, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def heads_a(
    num_heads: int = 2,
    num_layers: int = 1,
    hidden: int = 64,
    vocab: int = 97,
    dtype: torch.dtype = torch.float16,
    bias: bool = True,
    lm_head: bool = True,
    seed: int = 0,
) -> Tensors:
    """A format A state dict (format B without lm_head) of small random values."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    tensors: Tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = values(hidden, hidden)
            if bias:
                tensors[f"{head}.{layer}.linear.bias"] = values(hidden)
        if lm_head:
            tensors[f"{head}.{num_layers}.weight"] = values(vocab, hidden)
    return tensors


def as_vllm(tensors: Tensors, prefix: str = "") -> Tensors:
    """The same heads under vLLM's keys."""
    return {prefix + _vllm_key(key): value for key, value in tensors.items()}


def _vllm_key(key: str) -> str:
    head, layer, *rest = key.split(".")
    return f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{layer}.{rest[-1]}"


def as_tensorrt_llm(tensors: Tensors) -> Tensors:
    """The same heads under TensorRT-LLM's keys."""
    renamed = {}
    for key, value in tensors.items():
        head, layer, *rest = key.split(".")
        place = "lm_head.weight" if rest == ["weight"] else f"medusa_layers.{layer}.linear.{rest[-1]}"
        renamed[f"medusa_heads.{head}.{place}"] = value
    return renamed


def save_sharded(folder: Path, tensors: Tensors, shards: int = 2) -> Path:
    """A sharded safetensors checkpoint with its index."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        held = keys[number::shards]
        save_file({key: tensors[key].contiguous() for key in held}, folder / name)
        weight_map |= dict.fromkeys(held, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    """One safetensors file in a new folder, with a config.json where given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "medusa_lm_head.safetensors"
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
