"""The compiled library and its C structures (csrc/gemm.h, csrc/attention.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p
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
        ("weight", POINTER(WeightStruct)),
        *((name, c_void_p) for name in ("x", "bias", "residual", "out")),
        *((name, c_int64) for name in ("rows", "x_stride", "residual_stride", "out_stride")),
        *((name, c_int32) for name in ("x_dtype", "out_dtype", "planes", "silu")),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "mq_gemm": [c_void_p, c_int64, c_int32],
}


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library for an instruction set, compiled on first use; raises CompileError."""
    library = ctypes.CDLL(str(build(isa)))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def library() -> ctypes.CDLL:
    """The library for `chosen_isa()`; raises CompileError where there is no compiler."""
    return load(chosen_isa())
