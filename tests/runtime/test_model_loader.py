"""Loading a base: damaged or foreign folders end in one clear line, never in a wrong model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MakeModel

from medusa_quant.errors import InputError
from medusa_quant.runtime.model import load_base, load_tokenizer


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite model.safetensors: add or replace tensors, or drop them where None. `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, "model.norm.weight: the base model lacks this tensor"),
        ({"lm_head__weight": None}, "lm_head.weight: the base model lacks this tensor"),
        ({"model__norm__weight": torch.ones(7)}, r"model.norm.weight: .*expected float \[48\].*\[7\]"),
        ({"model__norm__weight": torch.ones(48, dtype=torch.int32)}, "model.norm.weight: .*torch.int32"),
        ({"model__layers__0__mlp__router": torch.ones(4)}, "layers.0.mlp.router"),
        ({"model__layers__7__input_layernorm__weight": torch.ones(48)}, "layers.7.input_layernorm"),
        ({"lm_head__weight": torch.full((131, 48), float("nan"))}, "lm_head: .*NaN or Inf"),
    ],
)
def test_wrong_tensors_are_named(make_model: MakeModel, changes: dict[str, Any], message: str) -> None:
    folder, _ = make_model("Llama")
    edit(folder, **changes)
    with pytest.raises(InputError, match=message):
        load_base(folder, "int8")


def test_qwen2_without_its_biases_is_refused(make_model: MakeModel) -> None:
    folder, _ = make_model("Qwen2")
    edit(folder, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(InputError, match=r"layers.1.self_attn.k_proj.bias: the base model lacks"):
        load_base(folder)


def test_known_extra_tensors_are_no_error(make_model: MakeModel) -> None:
    """Old checkpoints' rotary buffers, the heads of a merged Medusa checkpoint, a repeated tied LM matrix."""
    folder, reference = make_model("Llama", tie_word_embeddings=True)
    edit(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        medusa_head__0__0__linear__weight=torch.ones(48, 48),
        lm_head__weight=reference.lm_head.weight.detach().clone(),
    )
    load_base(folder)


def test_tied_config_with_another_lm_matrix_is_refused(make_model: MakeModel) -> None:
    folder, _ = make_model("Llama", tie_word_embeddings=True)
    edit(folder, lm_head__weight=torch.ones(131, 48))
    with pytest.raises(InputError, match=r"lm_head.weight: .*tie_word_embeddings"):
        load_base(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int3"}, "unknown dtype"),
        ({"dtype": "int8", "activation": "fp8"}, "unknown activation"),
        ({"dtype": "int4", "group_size": 48}, "bad group size"),
    ],
)
def test_bad_arguments(tiny_llama: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_base(tiny_llama, **arguments)


def test_folders_that_are_no_base(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(InputError, match="not a base model"):
        load_base(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        load_base(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(InputError, match="unsupported architecture"):
        load_base(tmp_path)
    with pytest.raises(InputError, match="no usable tokenizer"):
        load_tokenizer(tiny_llama)


def test_damaged_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="not a complete GGUF file"):
        load_base(file)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"several .gguf files"):
        load_base(tmp_path)
