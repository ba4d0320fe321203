"""Quantized matrices in foreign checkpoints: told by their parts, read code for code."""

from __future__ import annotations

import torch

from ..errors import InputError
from ..quantization import PER_CHANNEL, QuantizedWeight
from ..quantization.gptq_format import (
    CHECKPOINT_FORMATS,
    from_gptq,
    infer_group_size,
    is_sequential,
    stored_zeros,
)
from .bnb import bnb_matrix, is_bnb
from .heads import HeadTensor, TensorId, dtype_name
from .source import Source
from .store import StoredTensor

Parts = dict[str, StoredTensor]


def packed_matrix(source: Source, tensor_id: TensorId, parts: Parts) -> HeadTensor:
    """A quantized matrix from its parts (`qweight`, `scales`, ...). Raises InputError for unknown parts."""
    if {"qweight", "qzeros", "scales"} <= set(parts) <= {"qweight", "qzeros", "scales", "g_idx"}:
        return _gptq_matrix(source, tensor_id, parts)
    if is_bnb(parts):
        return bnb_matrix(tensor_id, parts)
    anchor = next(iter(parts.values()))
    raise InputError(
        f"{tensor_id}: not a set of tensors any known format has",
        file=anchor.file,
        key=anchor.key,
        expected="weight, qweight + qzeros + scales (+ g_idx), or bitsandbytes' weight and state",
        found=" + ".join(
            f"{part} ({str(entry.dtype).removeprefix('torch.')})" for part, entry in parts.items()
        ),
    )


def _gptq_matrix(source: Source, tensor_id: TensorId, parts: Parts) -> HeadTensor:
    qweight, scales = parts["qweight"], parts["scales"]
    bits = _gptq_bits(source, parts)
    in_features, out_features = qweight.shape[0] * 32 // bits, qweight.shape[1]
    g_idx = parts["g_idx"].load() if "g_idx" in parts else None
    group_size = _gptq_group_size(source, in_features, scales.shape[0], g_idx)
    version = str(source.quantize_config.get("checkpoint_format", "gptq")).lower()
    if version not in CHECKPOINT_FORMATS:
        raise InputError(
            "unsupported checkpoint_format",
            file=source.path,
            expected=" or ".join(CHECKPOINT_FORMATS),
            found=version,
        )

    def load() -> QuantizedWeight:
        try:
            return from_gptq(
                qweight.load(), parts["qzeros"].load(), scales.load(), g_idx, bits, group_size, version
            )
        except ValueError as error:
            raise InputError(str(error), file=qweight.file, key=qweight.key) from error

    zeros = stored_zeros(parts["qzeros"].load(), bits, version)
    width = in_features if group_size == PER_CHANNEL else group_size
    return HeadTensor(
        tensor_id,
        qweight.key,
        qweight.file,
        (out_features, in_features),
        f"int{bits}",
        load,
        group_size=group_size,
        symmetric=not bool(zeros.any()),
        act_order=g_idx is not None and not is_sequential(g_idx, width),
        scale_dtype=dtype_name(scales.dtype),
        method="gptq checkpoint",
    )


def _gptq_bits(source: Source, parts: Parts) -> int:
    qweight = parts["qweight"]
    if qweight.dtype != torch.int32 or len(qweight.shape) != 2 or len(parts["scales"].shape) != 2:
        raise InputError(
            "not AutoGPTQ's packing", file=qweight.file, key=qweight.key, expected="int32 matrix"
        )
    words = qweight.shape[0]
    hint = source.quantize_config.get("bits")
    if "g_idx" in parts and words:
        bits = 32 * words // max(1, parts["g_idx"].shape[0])
    else:
        columns = parts["qzeros"].shape[1]
        bits = 32 * columns // max(1, parts["scales"].shape[1])
    if bits not in (4, 8):
        raise InputError(
            "unsupported bit width", file=qweight.file, key=qweight.key, expected="4 or 8", found=bits or hint
        )
    return bits


def _gptq_group_size(source: Source, in_features: int, num_groups: int, g_idx: torch.Tensor | None) -> int:
    hint = source.quantize_config.get("group_size")
    if isinstance(hint, int) and hint > 0 and -(-in_features // hint) == num_groups:
        return hint
    return infer_group_size(g_idx, num_groups, in_features)
