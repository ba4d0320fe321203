"""What the GPU set measures: the matrices of real Medusa heads, and the forms of weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_quant.kernels.triton.nf4 import dequantize_nf4, pack_nf4
from medusa_quant.kernels.triton.weight import TritonWeight, unpack
from medusa_quant.quantization import PER_CHANNEL

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Shape:
    """`heads` matrices of K input and N output features in one launch."""

    name: str
    heads: int
    K: int
    N: int


SHAPES = (
    Shape("7b resblock", 5, 4096, 4096),
    Shape("7b lm", 5, 4096, 32000),
    Shape("13b lm", 5, 5120, 32000),
    Shape("smollm2 lm", 1, 576, 49152),
)


@dataclass(frozen=True)
class Form:
    """How a weight is stored."""

    name: str
    kind: str
    group_size: int
    zeros: bool = False


FORMS = (
    Form("int4 g128", "int4", 128),
    Form("int4 g32 asym", "int4", 32, zeros=True),
    Form("int8", "int8", PER_CHANNEL),
    Form("nf4", "nf4", 64),
)


def random_weight(shape: Shape, form: Form, device: str) -> TritonWeight:
    """Random codes with scales near 1/sqrt(K): timing and arithmetic need no trained values."""
    heads, features, outputs = shape.heads, shape.K, shape.N
    groups = 1 if form.group_size == PER_CHANNEL else -(-features // form.group_size)
    high = {"int4": 8, "int8": 128, "nf4": 1}[form.kind]
    scales = ((0.5 + torch.rand(heads, groups, outputs, device=device)) / (high * features**0.5)).half()
    zeros = None
    if form.zeros:
        zeros = torch.randint(-high, high, scales.shape, device=device, dtype=torch.int8)
    if form.kind == "int8":
        codes = torch.randint(-128, 128, (heads, features, outputs), device=device, dtype=torch.int8)
        return TritonWeight("int8", codes, scales, features, form.group_size, zeros)
    rows = -(-features // 128) * 16
    words = torch.randint(-(2**31), 2**31, (heads, rows, outputs), device=device, dtype=torch.int64).to(
        torch.int32
    )
    table = None
    if form.kind == "nf4":
        table = pack_nf4(torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1, 1)).table
        assert table is not None
        table = table.to(device)
    return TritonWeight(form.kind, words, scales, features, form.group_size, zeros, table)


def dense(weight: TritonWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantized values [heads, K, N]."""
    if weight.kind == "nf4":
        return dequantize_nf4(weight).to(dtype)
    return torch.stack([one.dequantize(dtype) for one in unpack(weight)])
