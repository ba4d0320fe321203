"""`load_base` and `load_tokenizer`: from a path or a Hugging Face repo id to something that runs."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.gguf_file import find_gguf
from ...checkpoints.heads import LM_HEAD
from ...checkpoints.source import locate, read_json
from ...errors import InputError
from ...quantization import QuantizedWeight, Scheme, parse_dtype, quantize_weight
from ...workspace.sharding import shard_dense, shard_of
from ..ranks import ALONE, Ranks
from .config import ModelConfig, config_from_json
from .gguf import open_gguf
from .linear import Linear
from .llama import Layer, LlamaModel
from .lm_head import VOCAB, LMHead
from .split import Split
from .weights import Weights, weights_from_folder

_TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_base(
    source: str | Path,
    dtype: str = "fp32",
    *,
    activation: str = "int8",
    device: str | torch.device = "cpu",
    group_size: int | None = None,
    ranks: Ranks = ALONE,
) -> LlamaModel:
    """Load a base model: a Hugging Face folder or repo id, a GGUF file, or a folder holding one.

    dtype: of the linear layers: fp32, fp16, bf16, or int8 / int4 quantized here (round to nearest; int8
        per output channel, int4 in groups of `group_size`, default 32). Embedding rows stay 16-bit.
    activation: for integer weights, `int8` quantizes each row of activations too (fast on the CPU),
        `exact` keeps them in fp32.
    ranks: load this rank's share only, see `Split`.
    Raises InputError for anything missing, unsupported or of the wrong shape.
    """
    name = parse_dtype(dtype)
    if activation not in ("int8", "exact"):
        raise InputError("unknown activation mode", expected="int8 | exact", found=activation)
    config, weights = open_base(source)
    for warning in config.warnings:
        warnings.warn(f"{weights.path}: {warning}", stacklevel=2)
    return _Builder(config, weights, name, torch.device(device), group_size, activation, ranks).build()


def open_base(source: str | Path) -> tuple[ModelConfig, Weights]:
    """Configuration and (unread) tensors of a base model."""
    path = locate(source)
    gguf = find_gguf(path)
    if gguf is not None:
        return open_gguf(gguf)
    if not (path / "config.json").is_file():
        raise InputError(
            "not a base model",
            file=path,
            expected="a folder with config.json and safetensors, or a .gguf file",
        )
    generation = read_json(path / "generation_config.json")
    config = config_from_json(read_json(path / "config.json"), path / "config.json", generation)
    return config, weights_from_folder(path)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer (with its chat template) that belongs to a base, through transformers.

    Raises InputError where there is none.
    """
    _hide_source_folder()
    from transformers import AutoTokenizer

    path = locate(source)
    gguf = find_gguf(path)
    try:
        if gguf is not None:
            return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"no usable tokenizer: {reason}", file=path) from error


def _hide_source_folder() -> None:
    """Run from a source checkout, `kernels` would name our folder; transformers wants the package of that
    name, or nothing."""
    spec = None if "kernels" in sys.modules else find_spec("kernels")
    ours = find_spec("medusa_quant.kernels")
    if spec is not None and ours is not None and spec.origin == ours.origin:
        sys.modules["kernels"] = None  # type: ignore[assignment]


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: str,
        device: torch.device,
        group_size: int | None,
        activation: str,
        ranks: Ranks,
    ) -> None:
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        self.activation, self.split = activation, Split.of(config, ranks)
        self.scheme = None
        if dtype not in _TORCH_DTYPES:
            size = 32 if dtype == "int4" and group_size is None else group_size
            self.scheme = Scheme.for_dtype(dtype, size)
        # CPU kernels compute in fp32 whatever the weights; a GPU's tensor cores want 16 bits.
        self.compute = torch.float32
        if device.type != "cpu":
            self.compute = _TORCH_DTYPES.get(dtype, torch.bfloat16)

    def build(self) -> LlamaModel:
        config, take = self.config, self.weights.take
        table = take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = [self._layer(f"model.layers.{index}") for index in range(config.num_layers)]
        final_norm = self._norm("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            head = table
            repeated = self.weights.take_optional("lm_head.weight", tuple(table.shape))
            if repeated is not None and not torch.equal(repeated, table):
                raise InputError(
                    "differs from the embedding, though config.json says tie_word_embeddings",
                    file=self.weights.path,
                    key="lm_head.weight",
                )
        else:
            head = take("lm_head.weight", (config.vocab_size, config.hidden_size))
        shard = shard_of(LM_HEAD, head.shape, self.split.ranks.rank, self.split.ranks.tp, VOCAB)
        matrix = head if self.split.ranks.tp == 1 else shard_dense(head, shard).t()
        linear = self._linear([matrix], [None], "lm_head")
        lm_head = LMHead(linear, config.vocab_size, VOCAB, self.split.ranks)
        self.weights.check_all_used()
        return LlamaModel(
            config,
            self._embedding(table),
            layers,
            final_norm,
            lm_head,
            self.dtype,
            self.compute,
            self.device,
            self.split,
        )

    def _embedding(self, table: Tensor) -> Tensor:
        if self.dtype == "fp32" or table.dtype != torch.float32:
            return table.to(self.device)
        return table.to(self.device, _TORCH_DTYPES.get(self.dtype, torch.bfloat16))

    def _layer(self, prefix: str) -> Layer:
        config = self.config
        hidden, inner, q, kv = (
            config.hidden_size,
            config.intermediate_size,
            config.q_size,
            config.kv_size,
        )
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(
                {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv},
                hidden,
                config.attention_bias,
                divided=self.split.attention,
            ),
            q_norm=self._norm(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
            o=self._fused({f"{attention}.o_proj": hidden}, q, divided=self.split.attention),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused(
                {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, divided=self.split.mlp
            ),
            down=self._fused({f"{mlp}.down_proj": hidden}, inner, divided=self.split.mlp),
        )

    def _norm(self, key: str, size: int) -> Tensor:
        return self.weights.take(key, (size,)).to(self.device, self.compute)

    def _fused(
        self, parts: dict[str, int], inputs: int, needs_bias: bool = False, *, divided: bool
    ) -> Linear:
        """One linear layer from matrices that share their input; biases where their tensors exist."""
        matrices = [self.weights.take(f"{key}.weight", (size, inputs)) for key, size in parts.items()]
        take_bias = self.weights.take if needs_bias else self.weights.take_optional
        biases = [take_bias(f"{key}.bias", (size,)) for key, size in parts.items()]
        # Quantization looks at one output at a time, so the share has the codes of the whole.
        own = [self.split.rows(matrix, divided) for matrix in matrices]
        own_biases = [None if bias is None else self.split.rows(bias, divided) for bias in biases]
        return self._linear(own, own_biases, next(iter(parts)))

    def _linear(self, matrices: list[Tensor], biases: list[Tensor | None], key: str) -> Linear:
        bias = None
        if any(part is not None for part in biases):
            filled = [
                torch.zeros(matrix.shape[0]) if part is None else part.float()
                for matrix, part in zip(matrices, biases, strict=True)
            ]
            bias = torch.cat(filled).to(self.device, self.compute)
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return Linear(self._stored(matrix, key), bias, self.compute, self.activation, self.device)

    def _stored(self, matrix: Tensor, key: str) -> Tensor | QuantizedWeight:
        if self.scheme is None:
            return matrix.to(self.device, _TORCH_DTYPES[self.dtype])
        try:
            return quantize_weight(matrix, self.scheme)[0]
        except ValueError as error:
            raise InputError(str(error), file=self.weights.path, key=key) from error
