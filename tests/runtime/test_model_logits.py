"""The decoder's logits against transformers' own, family by family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MakeModel

from medusa_quant.quantization import Scheme, quantize_weight
from medusa_quant.runtime.model import LlamaModel, Segment, load_base

LENGTH = 100
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 6}),
    ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"head_dim": 16}),
    ("Mistral", {}),
    ("Mistral", {"sliding_window": 128}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 16}),
    ("Qwen3", {"attention_bias": True}),
    ("Llama", {"rope_parameters": LINEAR}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Qwen2", {"rope_parameters": YARN}),
    ("Qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}}),
    ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
]


def run_logits(model: LlamaModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of token ids [B, S], each row a segment of its own slot."""
    batch, length = ids.shape
    cache = model.new_cache(batch + 1, length + 3)
    # Slots in another order than the batch, so that a mix-up shows.
    segments = [Segment(batch - row, 0, length) for row in range(batch)]
    hidden = model.forward(ids.flatten(), torch.arange(length).repeat(batch), segments, cache)
    return model.logits(hidden).view(batch, length, -1)


def expected_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def some_ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 131, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:.*sliding-window")
@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_fp32_logits_equal_transformers(
    make_model: MakeModel, family: str, overrides: dict[str, Any]
) -> None:
    folder, reference = make_model(family, **overrides)
    ids = some_ids()
    torch.testing.assert_close(
        run_logits(load_base(folder), ids), expected_logits(reference, ids), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("parameters", [LINEAR, LLAMA3, YARN], ids=lambda value: value["rope_type"])
def test_rope_scaling_in_the_form_of_transformers_4(
    make_model: MakeModel, parameters: dict[str, Any]
) -> None:
    folder, reference = make_model("Llama", rope_parameters=parameters)
    raw = json.loads((folder / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    raw["rope_scaling"] = scaling
    (folder / "config.json").write_text(json.dumps(raw))
    ids = some_ids()
    torch.testing.assert_close(
        run_logits(load_base(folder), ids), expected_logits(reference, ids), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bit_weights_equal_transformers_with_the_same_rounding(
    make_model: MakeModel, dtype: str, torch_dtype: torch.dtype
) -> None:
    """Weights are stored in 16 bits and computed with in fp32, so that only their rounding is left."""
    folder, reference = make_model("Llama")
    for name, parameter in reference.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.to(torch_dtype).float()
    ids = some_ids()
    torch.testing.assert_close(
        run_logits(load_base(folder, dtype), ids), expected_logits(reference, ids), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "group_size"), [("int8", None), ("int8", 32), ("int4", None), ("int4", 64)]
)
def test_integer_weights_equal_transformers_with_dequantized_ones(
    make_model: MakeModel, dtype: str, group_size: int | None, tied: bool
) -> None:
    """`exact` activations: what is left is the order of fp32 sums. The tied embedding stays bf16."""
    folder, reference = make_model("Qwen2", tie_word_embeddings=tied)
    embedding = reference.get_input_embeddings().weight.data.bfloat16().float()
    scheme = Scheme.for_dtype(dtype, 32 if dtype == "int4" and group_size is None else group_size)
    with torch.no_grad():
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear):
                stored = quantize_weight(module.weight.data, scheme)[0].dequantize().t()
                module.weight = torch.nn.Parameter(stored.contiguous())
        reference.get_input_embeddings().weight = torch.nn.Parameter(embedding)
    ids = some_ids()
    model = load_base(folder, dtype, activation="exact", group_size=group_size)
    torch.testing.assert_close(run_logits(model, ids), expected_logits(reference, ids), rtol=0, atol=2e-4)


def test_int8_activations_stay_close_to_exact_ones(make_model: MakeModel) -> None:
    folder, reference = make_model("Llama")
    ids = some_ids()
    expected = expected_logits(reference, ids)
    got = run_logits(load_base(folder, "int8", activation="int8"), ids)
    assert (got - expected).norm() / expected.norm() < 0.05
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_sharded_folder(make_model: MakeModel, tmp_path: Path) -> None:
    _, reference = make_model("Llama")
    folder = tmp_path / "sharded"
    reference.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = some_ids()
    torch.testing.assert_close(
        run_logits(load_base(folder), ids), expected_logits(reference, ids), rtol=0, atol=1e-4
    )


def test_no_tokens_give_no_rows(tiny_llama: Path) -> None:
    model = load_base(tiny_llama)
    empty = torch.empty(0, dtype=torch.int64)
    hidden = model.forward(empty, empty, [], model.new_cache(1, 4))
    assert hidden.shape == (0, 48)
    assert model.logits(hidden).shape == (0, 131)
