"""AutoGPTQ's on-disk form of a `QuantizedWeight`: int32 words of 32/bits codes, and its zero convention.

`qweight` int32 [K*bits/32, N] packs along K, `qzeros` int32 [G, N*bits/32] along N, lowest bits first.
Codes are unsigned (signed code + 2^(bits-1)). Format v1 ("gptq") stores zero - 1, v2 ("gptq_v2") the zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scheme import PER_CHANNEL, Scheme
from .weight import QuantizedWeight

CHECKPOINT_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what was subtracted from each zero


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group_size: int,
    checkpoint_format: str,
) -> QuantizedWeight:
    """Read one linear layer: the same codes, without re-quantizing.

    qweight int32 [K*bits/32, N]; qzeros int32 [G, N*bits/32]; scales fp16 [G, N]; g_idx int32 [K] or None.
    g_idx is kept only where it is not simply k // group_size (act-order).
    Raises ValueError if shapes disagree or a zero cannot be held (8 bits, zero 256).
    """
    per_word = 32 // bits
    in_features = qweight.shape[0] * per_word
    if qzeros.shape != (scales.shape[0], -(-scales.shape[1] // per_word)):
        raise ValueError(f"qzeros {list(qzeros.shape)} does not belong to scales {list(scales.shape)}")
    if g_idx is not None:
        if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < scales.shape[0]:
            raise ValueError(f"g_idx must lie in [0, {scales.shape[0]})")
        if is_sequential(g_idx, Scheme(bits, group_size).group_width(in_features)):
            g_idx = None
    codes = _words_to_bytes(qweight)
    if bits == 8:
        codes = (codes ^ 0x80).view(torch.int8)
    zeros = stored_zeros(qzeros, bits, checkpoint_format)[:, : scales.shape[1]]
    if int(zeros.max()) > 127:
        raise ValueError("a zero point of 256 cannot be represented")
    signed_zeros = zeros.to(torch.int8) if bool(zeros.any()) else None
    return QuantizedWeight(codes, scales, in_features, bits, group_size, signed_zeros, g_idx)


def to_gptq(weight: QuantizedWeight, checkpoint_format: str = "gptq") -> dict[str, Tensor]:
    """Inverse of `from_gptq`: qweight, qzeros, scales (fp16) and g_idx of one linear layer.

    Raises ValueError for what the format cannot hold: K or N not a multiple of 32, scales that fp16
    would underflow, a low-rank correction, and (v1) a zero point of 0.
    """
    if weight.low_rank_a is not None:
        raise ValueError("AutoGPTQ's format has no place for a low-rank correction")
    features, outputs = weight.shape
    if features % 32 or outputs % 32:
        raise ValueError(f"AutoGPTQ needs multiples of 32 features, got {features} in and {outputs} out")
    if weight.scales.dtype != torch.float16:
        raise ValueError("AutoGPTQ stores scales in fp16, where these would underflow or overflow")
    offset = 2 ** (weight.bits - 1)
    zeros = torch.zeros_like(weight.scales, dtype=torch.int32)
    if weight.zeros is not None:
        zeros += weight.zeros
    zeros += offset - CHECKPOINT_FORMATS[checkpoint_format]
    # Only real zero points can be out of range; a plan's meta tensors have no values to look at.
    if weight.zeros is not None and not zeros.is_meta and int(zeros.min()) < 0:
        raise ValueError("a zero point of 0 cannot be stored in checkpoint_format gptq (v1); use gptq_v2")
    codes = weight.qweight if weight.bits == 4 else weight.qweight.view(torch.uint8) ^ 0x80
    return {
        "qweight": _bytes_to_words(codes),
        "qzeros": _pack_columns(zeros, weight.bits),
        "scales": weight.scales.contiguous(),
        "g_idx": weight.group_index().to(torch.int32),
    }


def stored_zeros(qzeros: Tensor, bits: int, checkpoint_format: str) -> Tensor:
    """Zero points int32 [G, N] in the domain of signed codes; all 0 for a symmetric layer."""
    return _unpack_columns(qzeros, bits) + CHECKPOINT_FORMATS[checkpoint_format] - 2 ** (bits - 1)


def is_sequential(g_idx: Tensor, group_width: int) -> bool:
    """Whether g_idx is just k // group_width, so that it need not be kept."""
    return torch.equal(g_idx.long(), torch.arange(g_idx.numel()) // group_width)


def infer_group_size(g_idx: Tensor | None, num_groups: int, in_features: int) -> int:
    """Group size of a layer without a quantize_config: the size of group 0, or -1 for a single group."""
    if num_groups == 1:
        return PER_CHANNEL
    if g_idx is None:
        return -(-in_features // num_groups)
    return int((g_idx == 0).sum())


def _words_to_bytes(words: Tensor) -> Tensor:
    """int32 [R, N] -> uint8 [4R, N]: byte b of word r becomes row 4r + b (little-endian)."""
    rows, columns = words.shape
    as_bytes = words.contiguous().view(torch.uint8).view(rows, columns, 4)
    return as_bytes.permute(0, 2, 1).reshape(rows * 4, columns)


def _bytes_to_words(rows: Tensor) -> Tensor:
    words = rows.reshape(rows.shape[0] // 4, 4, rows.shape[1]).permute(0, 2, 1).contiguous()
    return words.view(torch.int32).squeeze(-1)


def _unpack_columns(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.reshape(words.shape[0], -1)


def _pack_columns(values: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int64, device=values.device)
    words = (values.long().view(values.shape[0], -1, 32 // bits) << shifts).sum(-1)
    return words.to(torch.int32)
