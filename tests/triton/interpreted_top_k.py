"""Run by test_triton_interpreter.py under TRITON_INTERPRET=1: top-k, and the operators' registration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_quant.kernels.triton.heads import dequant_gemm, top_k
from medusa_quant.kernels.triton.ops import triton_gemm, triton_top_k
from medusa_quant.kernels.triton.weight import TritonWeight, pack, stack
from medusa_quant.quantization import QuantizedWeight, Scheme, quantize_weight


def integer_weight(bits: int, features: int, outputs: int, seed: int) -> QuantizedWeight:
    """Scale 1 and small codes: logits of integer x are exact, and full of ties."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-2, 3, (features, outputs), dtype=torch.int8, generator=generator)
    scales = torch.ones(-(-features // 32), outputs, dtype=torch.float16)
    return QuantizedWeight.from_codes(codes, scales, bits, 32)


@settings(deadline=None, max_examples=20)
@given(
    bits=st.sampled_from([4, 8]),
    outputs=st.sampled_from([1, 7, 64, 65, 200]),
    rows=st.sampled_from([0, 1, 3]),
    heads=st.integers(1, 3),
    count=st.integers(1, 10),
    shared=st.booleans(),
)
def test_ties_go_to_the_lowest_column(
    bits: int, outputs: int, rows: int, heads: int, count: int, shared: bool
) -> None:
    count = min(count, outputs)
    weights = [integer_weight(bits, 64, outputs, seed) for seed in range(heads)]
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randint(-1, 2, (1 if shared else heads, rows, 64), generator=generator).half()
    values, columns = top_k(x, stack([pack(weight) for weight in weights]), count)
    logits = x.float() @ torch.stack([weight.dequantize() for weight in weights])
    best, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, best[..., :count])
    assert torch.equal(columns, order[..., :count])


def test_large_vocabulary_and_the_largest_count() -> None:
    weight, _ = quantize_weight(
        torch.randn(1500, 96, generator=torch.Generator().manual_seed(1)), Scheme(4, 32, symmetric=False)
    )
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(2))
    values, columns = top_k(x, pack(weight), 32)
    logits = dequant_gemm(x, pack(weight))
    best, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, best[:, :32])
    assert torch.equal(columns, order[:, :32])


def test_all_logits_negative_never_picks_padding() -> None:
    codes = torch.full((32, 70), -7, dtype=torch.int8)
    weight = pack(QuantizedWeight.from_codes(codes, torch.ones(1, 70, dtype=torch.float16), 4, 32))
    values, columns = top_k(torch.ones(1, 32).half(), weight, 32)
    assert columns[0].tolist() == list(range(32))
    assert (values == -7 * 32).all()


@pytest.mark.parametrize("count", [0, 33, -1])
def test_counts_outside_the_range_are_refused(count: int) -> None:
    weight = pack(integer_weight(4, 32, 64, 0))
    with pytest.raises(ValueError, match="top-k"):
        top_k(torch.ones(1, 32).half(), weight, count)


def parts(weight: TritonWeight) -> tuple[torch.Tensor | None, ...]:
    return weight.qweight, weight.scales, weight.zeros, weight.table


@pytest.mark.parametrize("symmetric", [True, False])
def test_operators_are_registered_correctly(symmetric: bool) -> None:
    weight, _ = quantize_weight(
        torch.randn(24, 96, generator=torch.Generator().manual_seed(3)), Scheme(4, 32, symmetric)
    )
    packed = stack([pack(weight), pack(weight)])
    x = torch.randn(1, 3, 96).half()
    bias, residual = torch.randn(2, 24), torch.randn(2, 3, 24).half()
    torch.library.opcheck(triton_gemm, (x, *parts(packed), bias, residual, "int4", 32, True))
    torch.library.opcheck(triton_gemm, (x, *parts(packed), None, None, "int4", 32, False))
    torch.library.opcheck(triton_top_k, (x, *parts(packed), "int4", 32, 5))


def test_compile_captures_a_head_in_one_graph() -> None:
    resblock, _ = quantize_weight(torch.randn(64, 64) / 8, Scheme(8))
    matrix, _ = quantize_weight(torch.randn(40, 64) / 8, Scheme(4, 32))
    packed = pack(resblock), pack(matrix)

    def head(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return top_k(dequant_gemm(x, packed[0], bias, "silu", x), packed[1], 4)

    x, bias = torch.randn(3, 64).half(), torch.randn(64).half()
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(x, bias), head(x, bias), strict=True):
        assert torch.equal(found, wanted)
