"""`ModelConfig`: what the decoder needs to know of a base model, and reading it from a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError

# Vicuna and SmolLM2 are LlamaForCausalLM.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# transformers' class defaults, for keys that a config.json may leave out because they equal them.
_DEFAULT_THETA = 10000.0
_DEFAULT_EPS = 1e-6
_DEFAULT_WINDOW = {"MistralForCausalLM": 4096}
_DEFAULT_POSITIONS = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `type` one of ROPE_TYPES; `params` holds the scaling keys of transformers'
    `rope_parameters` (factor, low_freq_factor, beta_fast, original_max_position_embeddings, ...)."""

    theta: float
    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a Llama-family decoder.

    max_position_embeddings: the longest context served, prompt and output together. It is the sliding
        window where the model has one: up to that length windowed and full attention are the same.
    attention_bias: q, k and v have biases (o_proj's is used where its tensor is present).
    eos_token_ids: every id that ends a text, from config.json and generation_config.json.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def config_from_json(
    raw: Mapping[str, Any], file: Path, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a Hugging Face config.json (forms of transformers 4 and 5).

    generation: generation_config.json, for its end-of-text ids.
    Raises InputError naming file and key for an architecture, rope type or switch the decoder lacks.
    """
    architecture = _architecture(raw, file)
    hidden, heads = _positive(raw, "hidden_size", file), _positive(raw, "num_attention_heads", file)
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise InputError(
            "not a divisor of num_attention_heads", file=file, key="num_key_value_heads", found=kv_heads
        )
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(
            "unsupported activation", file=file, key="hidden_act", expected="silu", found=raw["hidden_act"]
        )
    if raw.get("quantization_config"):
        raise InputError(
            "an already quantized base model is not supported",
            file=file,
            key="quantization_config",
            fix="give the 16-bit model; it is quantized on load by --base-dtype int8 or int4",
        )
    positions = int(raw.get("max_position_embeddings") or _DEFAULT_POSITIONS.get(architecture, 32768))
    warnings: tuple[str, ...] = ()
    window = _sliding_window(raw, architecture)
    if window is not None and window < positions:
        warnings = (f"sliding-window attention: the context is limited to the window of {window} tokens",)
    eos = {**_token_ids(raw.get("eos_token_id")), **_token_ids((generation or {}).get("eos_token_id"))}
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", file),
        num_layers=_positive(raw, "num_hidden_layers", file),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(raw, "vocab_size", file),
        max_position_embeddings=positions if window is None else min(positions, window),
        rms_norm_eps=float(raw.get("rms_norm_eps", _DEFAULT_EPS)),
        rope=_rope(raw, positions, file),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=tuple(eos),
        bos_token_id=raw.get("bos_token_id"),
        warnings=warnings,
    )


def _architecture(raw: Mapping[str, Any], file: Path) -> str:
    found = (raw.get("architectures") or [None])[0]
    if found is None:
        by_type = {name[: -len("ForCausalLM")].lower(): name for name in ARCHITECTURES}
        found = by_type.get(str(raw.get("model_type")), raw.get("model_type"))
    if found not in ARCHITECTURES:
        raise InputError(
            "unsupported architecture",
            file=file,
            key="architectures",
            expected=" | ".join(ARCHITECTURES),
            found=found,
        )
    return str(found)


def _positive(raw: Mapping[str, Any], key: str, file: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError("missing or not a positive number", file=file, key=key, found=value)
    return value


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    if architecture != "MistralForCausalLM":
        if not raw.get("use_sliding_window", False):
            return None
        # transformers windows only the layers from max_window_layers on.
        if "layer_types" in raw and "sliding_attention" not in raw["layer_types"]:
            return None
    window = raw.get("sliding_window", _DEFAULT_WINDOW.get(architecture, 4096))
    return None if window is None else int(window)


def _token_ids(value: object) -> dict[int, None]:
    ids = value if isinstance(value, list) else [value]
    return dict.fromkeys(token for token in ids if isinstance(token, int))


def _rope(raw: Mapping[str, Any], positions: int, file: Path) -> RopeConfig:
    """`rope_scaling` + `rope_theta` (transformers 4) or `rope_parameters` (5, which holds both)."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    params = dict(raw.get(key) or {})
    if any(isinstance(value, Mapping) for value in params.values()):
        raise InputError("rope parameters that differ between layers are not supported", file=file, key=key)
    theta = params.pop("rope_theta", None) or raw.get("rope_theta") or _DEFAULT_THETA
    # Old configs say `type`; where both are given transformers reads rope_type.
    old = params.pop("type", None)
    kind = params.pop("rope_type", None) or old or "default"
    if kind not in ROPE_TYPES:
        raise InputError(
            "unsupported rope type", file=file, key=key, expected=" | ".join(ROPE_TYPES), found=kind
        )
    partial = params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise InputError("partial rotary embedding is not supported", file=file, key=key, found=partial)
    if params.get("original_max_position_embeddings") is None:
        params["original_max_position_embeddings"] = raw.get("original_max_position_embeddings") or positions
    required = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor",),
    }
    for name in required.get(kind, ()):
        value = params.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise InputError(f"rope type {kind} needs a positive {name}", file=file, key=key, found=value)
    return RopeConfig(float(theta), kind, params)
