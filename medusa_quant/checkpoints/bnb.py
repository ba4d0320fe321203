"""bitsandbytes' state dicts: LLM.int8 rows read code for code, nf4 and fp4 by their table of values."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..quantization import PER_CHANNEL, QuantizedWeight
from .heads import HeadTensor, TensorId
from .store import StoredTensor

Parts = dict[str, StoredTensor]

_INT8_PARTS = {"weight", "SCB", "weight_format"}
_STATE = "weight.quant_state.bitsandbytes__"
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def is_bnb(parts: Parts) -> bool:
    """Whether these are the tensors of one linear layer as bitsandbytes stores it."""
    return "SCB" in parts or any(part.startswith(_STATE) for part in parts)


def bnb_matrix(tensor_id: TensorId, parts: Parts) -> HeadTensor:
    """A matrix of bitsandbytes. Raises InputError for parts that are missing or do not belong together."""
    return _int8_matrix(tensor_id, parts) if "SCB" in parts else _table_matrix(tensor_id, parts)


def _int8_matrix(tensor_id: TensorId, parts: Parts) -> HeadTensor:
    weight, scale = parts.get("weight"), parts["SCB"]
    if weight is None or weight.dtype != torch.int8 or len(weight.shape) != 2 or set(parts) - _INT8_PARTS:
        raise _broken(tensor_id, parts, "an int8 matrix `weight` and its row scales `SCB`")
    if scale.shape != weight.shape[:1]:
        raise _broken(tensor_id, parts, f"SCB [{weight.shape[0]}]")
    row_major = "weight_format" not in parts or int(parts["weight_format"].load()) == 0
    if not row_major:
        raise _broken(tensor_id, parts, "weight_format row (0)")

    def load() -> QuantizedWeight:
        # w = code * SCB / 127 (Dettmers et al. 2022).
        return QuantizedWeight(
            weight.load().t().contiguous(), scale.load().float().unsqueeze(0) / 127, weight.shape[1], 8
        )

    return HeadTensor(
        tensor_id,
        weight.key,
        weight.file,
        weight.shape,
        "int8",
        load,
        group_size=PER_CHANNEL,
        symmetric=True,
        scale_dtype="fp32",
        method="bitsandbytes int8",
    )


def _table_matrix(tensor_id: TensorId, parts: Parts) -> HeadTensor:
    name = next(part for part in parts if part.startswith(_STATE))
    state = _read_state(parts[name])
    nested = "nested_blocksize" in state
    needed = {"weight", "weight.absmax", "weight.quant_map", name}
    needed |= {"weight.nested_absmax", "weight.nested_quant_map"} if nested else set()
    if set(parts) != needed:
        raise _broken(tensor_id, parts, " + ".join(sorted(needed)))
    shape = tuple(int(size) for size in state["shape"])
    if len(shape) != 2 or torch.Size(parts["weight"].shape).numel() * 2 != shape[0] * shape[1]:
        raise _broken(tensor_id, parts, f"packed values of {list(shape)}")
    dtype = _DTYPES.get(str(state.get("dtype")), "fp32")
    weight = parts["weight"]
    return HeadTensor(
        tensor_id, weight.key, weight.file, shape, dtype, lambda: _dequantize(parts, state, shape, dtype)
    )


def _dequantize(parts: Parts, state: dict[str, Any], shape: tuple[int, ...], dtype: str) -> Tensor:
    """Values [N, K]: the table's entry times its block's absmax; high nibble first (Dettmers et al. 2023)."""
    packed = parts["weight"].load().reshape(-1)
    absmax = parts["weight.absmax"].load()
    if "nested_blocksize" in state:
        table = parts["weight.nested_quant_map"].load().float()
        outer = parts["weight.nested_absmax"].load().float()
        outer = outer.repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
        absmax = table[absmax.long()] * outer + float(state["nested_offset"])
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(-1).long()
    values = parts["weight.quant_map"].load().float()[codes]
    values *= absmax.float().repeat_interleave(int(state["blocksize"]))[: values.numel()]
    target = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    return values.view(shape).to(target)


def _read_state(entry: StoredTensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(entry.load().tolist()).decode("utf-8"))
        state["shape"], state["blocksize"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("not a quant_state of bitsandbytes", file=entry.file, key=entry.key) from error
    return dict(state)


def _broken(tensor_id: TensorId, parts: Parts, expected: str) -> InputError:
    anchor = next(iter(parts.values()))
    return InputError(
        f"{tensor_id}: not as bitsandbytes stores it",
        file=anchor.file,
        key=anchor.key,
        expected=expected,
        found=" + ".join(sorted(parts)),
    )
