"""Tiny random Hugging Face models, with the transformers model that wrote each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MakeModel = Callable[..., tuple[Path, Any]]


def build_model(folder: Path, family: str = "Llama", seed: int = 0, **overrides: Any) -> Any:
    """Write a random model of a family (Llama, Mistral, Qwen2, Qwen3) and return transformers' fp32 one."""
    import transformers

    torch.manual_seed(seed)
    if family == "Mistral":
        overrides.setdefault("sliding_window", None)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **overrides})
    config.architectures = [f"{family}ForCausalLM"]
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide that they are unused.
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder)
    return model
