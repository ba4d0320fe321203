"""config.json: what is read from it, and what is refused with one line that says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_quant.errors import InputError
from medusa_quant.runtime.model.config import config_from_json

FILE = Path("base/config.json")
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architecture .*found GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mamba"}, "unsupported architecture .*found mamba"),
        ({"hidden_act": "gelu"}, "hidden_act: unsupported activation"),
        ({"quantization_config": {"bits": 4}}, "already quantized"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: not a divisor"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "unsupported rope type .*found dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "unsupported rope type .*found longrope"),
        ({"rope_scaling": {"type": "linear"}}, "linear needs a positive factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs a positive low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
    ],
)
def test_refused_with_file_and_reason(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        config_from_json({**RAW, **overrides}, FILE)
    assert str(error.value).startswith("base/config.json: ")
    assert "\n" not in str(error.value)


def test_defaults_of_a_sparse_config() -> None:
    config = config_from_json(RAW, FILE)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10000.0)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


def test_model_type_stands_in_for_architectures() -> None:
    config = config_from_json({**RAW, "architectures": None, "model_type": "qwen3"}, FILE)
    assert (config.architecture, config.qk_norm) == ("Qwen3ForCausalLM", True)


def test_end_ids_of_both_files_are_joined() -> None:
    config = config_from_json({**RAW, "eos_token_id": 2}, FILE, {"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 50),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}, 50),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True}, 32),
        ({"sliding_window": 32}, 50),
    ],
)
def test_a_sliding_window_limits_the_context_and_says_so(overrides: dict[str, Any], limit: int) -> None:
    config = config_from_json({**RAW, "max_position_embeddings": 50, **overrides}, FILE)
    assert config.max_position_embeddings == limit
    assert bool(config.warnings) == (limit < 50)
