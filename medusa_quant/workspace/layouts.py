"""The layouts a conversion can write: what is stored of each tensor, under which name, in which file."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checkpoints.formats import MEDUSA, VLLM, KeyFormat
from ..checkpoints.heads import LM_HEAD, TOKEN_MAP, TensorId
from ..errors import InputError
from ..quantization import PER_CHANNEL, QuantizedWeight
from ..quantization.gptq_format import to_gptq
from .naming import WEIGHTS_FOLDER, rank_name
from .sharding import Shard, shard_dense, shard_quantized


@dataclass(frozen=True)
class Layout:
    """folder: below --out. container: file holding all tensors of a rank, None for raw files.
    key_format: a checkpoint format's naming (one rank, matrices as (out, in)), None for rank files.
    codes: whether integer weights stay integers (False: dequantized)."""

    name: str
    folder: str = "."
    container: str | None = None
    key_format: KeyFormat | None = None
    codes: bool = True

    def name_of(self, tensor: TensorId, num_layers: int, rank: int, part: str) -> str:
        """File name or container key of one stored part."""
        if self.key_format is None:
            return rank_name(tensor, rank, part)
        if tensor.role == TOKEN_MAP:
            return "token_map"
        if tensor.role == LM_HEAD:
            return self.key_format.lm_head_key(tensor.head, num_layers, part)
        return self.key_format.resblock_key(tensor.head, tensor.layer, part)

    def file_of(self, name: str, rank: int) -> str:
        """The file, in `folder`, that holds the part of this name."""
        return name if self.container is None else self.container.format(rank=rank)

    def parts(
        self, tensor: TensorId, value: Tensor | QuantizedWeight, shard: Shard, gptq_format: str = "gptq"
    ) -> dict[str, Tensor]:
        """What is stored of a tensor for one rank, by part name; works on meta tensors too (for plans).

        value: float (out, in) / [N], or quantized. Raises ValueError for what the layout cannot hold.
        """
        if isinstance(value, QuantizedWeight):
            if self.key_format is None:
                return _rank_parts(shard_quantized(value, shard))
            if self.codes:
                return to_gptq(value, gptq_format)
            # Scales kept in fp32 stand for values that fp16 would not hold.
            return {"weight": value.dequantize(value.scales.dtype).t()}
        part = "bias" if tensor.role.endswith("bias") else "weight"
        return {part: shard_dense(value, shard) if self.key_format is None else value}


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("turbomind", folder=WEIGHTS_FOLDER),
        Layout("safetensors", container="medusa.rank{rank}.safetensors"),
        Layout("hf", container="medusa_lm_head.safetensors", key_format=MEDUSA, codes=False),
        Layout("vllm", container="model.safetensors", key_format=VLLM, codes=False),
        Layout("gptq", container="model.safetensors", key_format=MEDUSA),
    )
}


def layout_named(name: str) -> Layout:
    """Raises InputError for an unknown layout."""
    try:
        return LAYOUTS[name.strip().lower()]
    except KeyError:
        raise InputError("unknown layout", expected=" | ".join(LAYOUTS), found=name) from None


def _rank_parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    parts = weight.tensors()
    if weight.group_size == PER_CHANNEL:
        for name in ("scales", "zeros"):
            if name in parts:
                parts[name] = parts[name].reshape(-1)
    return parts
