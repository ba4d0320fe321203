"""Fixtures of the runtime's tests: random bases of a few thousand weights."""

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
