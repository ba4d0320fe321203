"""`MedusaHeads`: what every checkpoint and converted folder is read into. Shapes now, data later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization import QuantizedWeight

WEIGHT, BIAS, LM_HEAD, TOKEN_MAP = "resblock.weight", "resblock.bias", "lm_head.weight", "token_map"

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class TensorId(NamedTuple):
    """Which tensor of which head: head and layer 0-based (the LM matrix has layer L)."""

    head: int
    layer: int
    role: str

    def __str__(self) -> str:
        if self.role == TOKEN_MAP:
            return "token_map"
        where = f"head {self.head}"
        return f"{where} lm_head" if self.role == LM_HEAD else f"{where} layer {self.layer} {self.role[9:]}"


@dataclass(frozen=True)
class HeadTensor:
    """One tensor, not yet read.

    key, file: where it comes from. shape: (out, in) = [N, K] for a matrix, [N] for a bias.
    dtype: fp32, fp16, bf16, fp64, int8, int4 (or int32 for a token map).
    load: a float tensor of that shape, possibly a view of a mapped file; or a QuantizedWeight ([K, N]).
    The rest is set for quantized matrices: how they were made and, where a manifest tells, their error.
    low_rank: rank of the correction added to the codes, 0 for none.
    """

    id: TensorId
    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor | QuantizedWeight]
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool = False
    scale_dtype: str | None = None
    low_rank: int = 0
    method: str | None = None
    error: dict[str, float] | None = None

    @property
    def quantized(self) -> bool:
        return self.dtype.startswith("int") and self.id.role != TOKEN_MAP

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def dense(self) -> Tensor:
        """The values as a float tensor of `shape`; a quantized matrix is dequantized to fp32."""
        value = self.load()
        return value.dequantize().t() if isinstance(value, QuantizedWeight) else value


@dataclass(frozen=True)
class MedusaHeads:
    """The heads of one checkpoint, neutral to its format.

    tensors: every tensor by id; a shared LM matrix (format B) has none.
    vocab_size: true V, or None where the LM matrix is shared and no config tells.
    files: the files read. warnings: what was odd but accepted. config: the checkpoint's config (hints).
    """

    path: Path
    format: str
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    tensors: dict[TensorId, HeadTensor]
    files: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def shared_lm_head(self) -> bool:
        return self.lm_head(0) is None

    @property
    def has_bias(self) -> bool:
        return self.resblock_bias(0, 0) is not None

    def __iter__(self) -> Iterator[HeadTensor]:
        """Tensors in the order of heads and layers."""
        return iter(self.tensors.values())

    def resblock_weight(self, head: int, layer: int) -> HeadTensor:
        """ResBlock matrix [H, H] (out, in)."""
        return self.tensors[TensorId(head, layer, WEIGHT)]

    def resblock_bias(self, head: int, layer: int) -> HeadTensor | None:
        """ResBlock bias [H], or None where the checkpoint has none at all."""
        return self.tensors.get(TensorId(head, layer, BIAS))

    def lm_head(self, head: int) -> HeadTensor | None:
        """LM matrix [V, H] (out, in), or None where the heads share the base model's."""
        return self.tensors.get(TensorId(head, self.num_layers, LM_HEAD))

    def token_map(self) -> HeadTensor | None:
        """int32 [V']: the full-vocabulary id of each LM row, or None where rows are ids."""
        return self.tensors.get(TensorId(0, self.num_layers, TOKEN_MAP))


def dtype_name(dtype: torch.dtype) -> str:
    """`fp16` for torch.float16 and so on; torch's own name for what is no weight dtype."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
