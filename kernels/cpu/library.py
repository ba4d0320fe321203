"""The compiled library and its C structures (csrc/)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from .build import build
from .isa import chosen_isa

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INT4, INT8, DENSE = 0, 1, 2


class WeightStruct(ctypes.Structure):
    """`Weight` of csrc/gemm.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "zeros", "segments", "scale_row", "feature")),
        *(
            (name, c_int64)
            for name in ("in_features", "out_features", "num_segments", "scale_rows", "layout")
        ),
        ("kind", c_int32),
        ("dtype", c_int32),
    )


class JobStruct(ctypes.Structure):
    """`Job` of csrc/gemm.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "x", "bias", "residual", "out")),
        *((name, c_int64) for name in ("rows", "x_stride", "residual_stride", "out_stride")),
        *((name, c_int32) for name in ("x_dtype", "out_dtype", "planes", "silu")),
    )


class SegmentStruct(ctypes.Structure):
    """`SegmentStruct` of csrc/ops.h."""

    _fields_ = (("slot", c_int64), ("start", c_int64), ("count", c_int64), ("tree_mask", c_void_p))


class AttentionStruct(ctypes.Structure):
    """`AttentionJob` of csrc/ops.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "k_cache", "v_cache", "segments", "out")),
        *((name, c_int64) for name in ("num_segments", "heads", "kv_heads", "head_dim", "max_len")),
        ("scale", c_float),
        ("cache_dtype", c_int32),
        ("threads", c_int32),
    )


class RopeStruct(ctypes.Structure):
    """`RopeJob` of csrc/ops.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "cos", "sin", "rotated")),
        *((name, c_void_p) for name in ("k_cache", "v_cache", "slot", "position")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim", "max_len")),
        ("cache_dtype", c_int32),
        ("threads", c_int32),
    )


class LinearStruct(ctypes.Structure):
    """`LinearPart` of csrc/decoder.cpp."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("planes", c_int32))


class LayerStruct(ctypes.Structure):
    """`DecoderLayer` of csrc/decoder.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("k_cache", "v_cache")),
    )


class DecoderStruct(ctypes.Structure):
    """`DecoderJob` of csrc/decoder.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "x", "cos", "sin", "segments", "slot", "position")),
        *((name, c_int64) for name in ("num_layers", "tokens", "num_segments", "hidden", "inner")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "max_len")),
        ("eps", c_float),
        ("cache_dtype", c_int32),
        ("threads", c_int32),
    )


_POINTER, _COUNT, _THREADS = c_void_p, c_int64, c_int32
_SIGNATURES: dict[str, list[Any]] = {
    "mq_gemm": [_POINTER, _COUNT, _THREADS],
    "mq_gemm_one": [*[_POINTER] * 5, *[_COUNT] * 4, *[c_int32] * 4, _THREADS],
    "mq_rms_norm": [
        _POINTER, _COUNT, _POINTER, _POINTER, c_float, _POINTER, _POINTER, _COUNT, _COUNT, _THREADS,
    ],
    "mq_swiglu": [_POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT, _THREADS],
    "mq_rope_write_kv": [_POINTER],
    "mq_attention": [_POINTER],
    "mq_decode": [_POINTER],
    "mq_read": [_POINTER, _COUNT, _POINTER, _THREADS],
    "mq_top_k": [_POINTER, _COUNT, c_int32, _COUNT, _COUNT, _COUNT, _POINTER, _POINTER, _THREADS],
}  # fmt: skip


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library for an instruction set, compiled on first use; raises CompileError."""
    library = ctypes.CDLL(str(build(isa)))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


@cache
def library() -> ctypes.CDLL:
    """The library for `chosen_isa()` as it was at the first call; CompileError where there is no compiler."""
    return load(chosen_isa())
