"""GGUF files as a source: metadata to `ModelConfig`, tensors dequantized one at a time to fp32."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.gguf_file import GGUFFile, read_gguf
from ...errors import InputError
from .config import ModelConfig, RopeConfig
from .weights import Weights

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


def open_gguf(file: Path) -> tuple[ModelConfig, Weights]:
    """Configuration and tensors of a GGUF file, under their Hugging Face names.

    Raises InputError where the gguf package is missing, the file is damaged, or holds another architecture.
    """
    gguf = read_gguf(file)
    config = _config(gguf)
    names = {}
    for name in gguf.tensors:
        key = _hf_name(name)
        if key is None:
            raise InputError("a tensor this architecture has no place for", file=file, key=name)
        names[key] = name
    permuted = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}

    def load(key: str) -> Tensor:
        values = torch.from_numpy(gguf.load(names[key]))
        heads = permuted.get(".".join(key.split(".")[-2:]))
        if heads is not None and config.architecture == "LlamaForCausalLM":
            values = _unpermute(values, heads)
        return values

    return config, Weights(file, set(names), load)


def _hf_name(name: str) -> str | None:
    layer = _LAYER.match(name)
    if layer:
        part = _LAYER_NAMES.get(layer[2])
        return None if part is None else f"model.layers.{layer[1]}.{part}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else None


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of rotary pairs: rows [heads, dim/2, 2] back to [heads, 2, dim/2]."""
    outputs, features = weight.shape
    return weight.view(heads, -1, 2, features).transpose(1, 2).reshape(outputs, features)


def _config(gguf: GGUFFile) -> ModelConfig:
    file, value = gguf.path, gguf.metadata.get

    def number(key: str) -> int:
        found = value(f"{prefix}.{key}")
        if not isinstance(found, int):
            raise InputError("missing or not a number", file=file, key=f"{prefix}.{key}", found=found)
        return found

    prefix = value("general.architecture")
    if prefix not in _ARCHITECTURES:
        raise InputError(
            "unsupported architecture",
            file=file,
            key="general.architecture",
            expected=" | ".join(_ARCHITECTURES),
            found=prefix,
        )
    if value(f"{prefix}.expert_count"):
        raise InputError("mixture-of-experts is not supported", file=file, key=f"{prefix}.expert_count")
    hidden, heads = number("embedding_length"), number("attention.head_count")
    positions = number("context_length")
    names = gguf.tensors.keys()
    if "token_embd.weight" not in names:
        raise InputError("the base model lacks this tensor", file=file, key="token_embd.weight")
    eos = [value("tokenizer.ggml.eos_token_id"), value("tokenizer.ggml.eot_token_id")]
    return ModelConfig(
        architecture=_ARCHITECTURES[prefix],
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=value(f"{prefix}.attention.head_count_kv", heads),
        head_dim=value(f"{prefix}.attention.key_length", hidden // heads),
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        max_position_embeddings=positions,
        rms_norm_eps=float(value(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope(gguf, prefix, positions),
        tie_word_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if isinstance(token, int))),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
    )


def _rope(gguf: GGUFFile, prefix: str, positions: int) -> RopeConfig:
    file, value = gguf.path, gguf.metadata.get
    theta = float(value(f"{prefix}.rope.freq_base", 10000.0))
    if "rope_freqs.weight" in gguf.tensors:
        raise InputError("Llama 3 frequency factors in a GGUF are not supported", file=file, key="rope_freqs")
    kind = value(f"{prefix}.rope.scaling.type", "none")
    params = {
        "factor": value(f"{prefix}.rope.scaling.factor"),
        "original_max_position_embeddings": value(
            f"{prefix}.rope.scaling.original_context_length", positions
        ),
    }
    if kind == "none":
        return RopeConfig(theta, "default", {})
    if kind not in ("linear", "yarn") or not params["factor"] or not math.isfinite(params["factor"]):
        raise InputError("unsupported rope scaling", file=file, key=f"{prefix}.rope.scaling.type", found=kind)
    return RopeConfig(theta, kind, params)
