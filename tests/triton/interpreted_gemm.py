"""Run by test_triton_interpreter.py under TRITON_INTERPRET=1: the GEMM against fp64.

fp16 and fp32 only: the interpreter computes bf16 wrongly (that path is checked by compiling).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_quant.kernels.triton.backend import TritonBackend
from medusa_quant.kernels.triton.heads import dequant_gemm
from medusa_quant.kernels.triton.launch import launch_gemm
from medusa_quant.kernels.triton.nf4 import dequantize_nf4, pack_nf4
from medusa_quant.kernels.triton.weight import TritonWeight, pack, stack, unpack
from medusa_quant.quantization import QuantizedWeight, Scheme, quantize_weight

TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-5}


def quantized(scheme: Scheme, features: int, outputs: int, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    return quantize_weight(torch.randn(outputs, features, generator=generator) / features**0.5, scheme)[0]


def framed(tensor: Tensor, fill: float = float("nan")) -> Tensor:
    """The same values, contiguous, in the middle of a buffer of `fill`: a read outside shows."""
    margin = 512
    buffer = torch.full((tensor.numel() + 2 * margin,), fill, dtype=tensor.dtype)
    view = buffer[margin : margin + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


def haloed(tensor: Tensor) -> Tensor:
    """The same values [heads, M, K] as a strided view with NaN on every side of each row."""
    heads, rows, columns = tensor.shape
    buffer = torch.full((heads, rows + 40, columns + 160), float("nan"), dtype=tensor.dtype)
    view = buffer[:, 8 : 8 + rows, 16 : 16 + columns]
    view.copy_(tensor)
    return view


def poisoned(weight: TritonWeight) -> TritonWeight:
    zeros = None if weight.zeros is None else framed(weight.zeros, 7)
    return TritonWeight(
        weight.kind,
        framed(weight.qweight, 0x77),
        framed(weight.scales),
        weight.in_features,
        weight.group_size,
        zeros,
        None if weight.table is None else framed(weight.table),
    )


def expected(x: Tensor, values: Tensor, bias: Tensor | None, silu: bool, residual: Tensor | None) -> Tensor:
    """fp64 result for x [heads or 1, M, K] and values [heads, K, N]."""
    out = x.double() @ values.double()
    if bias is not None:
        out = out + bias.double()[:, None]
    if silu:
        out = torch.nn.functional.silu(out)
    return out if residual is None else out + residual.double()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert not found.isnan().any()
    error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error < TOLERANCE[found.dtype], float(error)


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([-1, 32, 64, 128]),
    symmetric=st.booleans(),
    features=st.sampled_from([1, 32, 96, 129, 160, 200, 384, 576]),
    outputs=st.sampled_from([1, 13, 31, 70]),
    rows=st.sampled_from([0, 1, 2, 5, 17]),
    heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    shared=st.booleans(),
    epilogue=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example(4, 128, False, 576, 31, 3, 2, torch.float16, False, (True, True, True))  # short last group
@example(8, 128, False, 129, 13, 1, 1, torch.float16, True, (True, True, True))  # K % 16 != 0
@example(4, 64, True, 2048, 31, 2, 1, torch.float16, True, (True, True, True))  # split-K, with epilogue
@example(8, -1, True, 2048, 31, 2, 2, torch.float16, True, (True, False, True))
def test_gemm_matches_fp64_amid_nan(
    bits: int,
    group: int,
    symmetric: bool,
    features: int,
    outputs: int,
    rows: int,
    heads: int,
    dtype: torch.dtype,
    shared: bool,
    epilogue: tuple[bool, bool, bool],
) -> None:
    torch.manual_seed(features * 31 + outputs)
    scheme = Scheme(bits, group, symmetric)
    weights = [quantized(scheme, features, outputs, seed) for seed in range(heads)]
    packed = poisoned(stack([pack(weight) for weight in weights]))
    x = haloed(torch.randn(1 if shared else heads, rows, features).to(dtype))
    has_bias, silu, has_residual = epilogue
    bias = framed(torch.randn(heads, outputs)) if has_bias else None
    residual = haloed(torch.randn(heads, rows, outputs).to(dtype)) if has_residual else None
    found = dequant_gemm(x, packed, bias, "silu" if silu else None, residual)
    values = torch.stack([weight.dequantize(torch.float64) for weight in weights])
    assert found.shape == (heads, rows, outputs)
    assert found.dtype == dtype
    assert_close(found, expected(x, values, bias, silu, residual))


@pytest.mark.parametrize("rows", [1, 33, 70, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_each_bucket_writes_all_of_out_and_nothing_else(bits: int, rows: int) -> None:
    torch.manual_seed(rows)
    weight = quantized(Scheme(bits, 32), 64, 70)
    x = torch.randn(1, rows, 64).half()
    out = framed(torch.full((1, rows, 70), float("nan"), dtype=torch.float16))
    launch_gemm(haloed(x), poisoned(pack(weight)), out)
    assert_close(out, expected(x, weight.dequantize(torch.float64)[None], None, False, None))
    storage = torch.empty(0, dtype=torch.float16).set_(out.untyped_storage())
    assert storage.isnan().sum() == storage.numel() - out.numel()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_rows_beside_it(bits: int) -> None:
    weight = pack(quantized(Scheme(bits, 128), 2048, 20))  # long enough for split-K
    x = torch.randn(6, 2048, generator=torch.Generator().manual_seed(3)).half()
    together = dequant_gemm(x, weight)
    for row in range(6):
        assert torch.equal(dequant_gemm(x[row : row + 1], weight)[0], together[row])


def test_strided_x_and_residual() -> None:
    weight = quantized(Scheme(4, 64, symmetric=False), 192, 24)
    x = torch.randn(192, 5, generator=torch.Generator().manual_seed(4)).half().t()
    residual = torch.randn(24, 5, generator=torch.Generator().manual_seed(5)).half().t()
    found = dequant_gemm(x, pack(weight), residual=residual)
    values = weight.dequantize(torch.float64)
    assert_close(found, expected(x[None], values[None], None, False, residual[None])[0])


@pytest.mark.parametrize("scale", [0.0, 1e-30, -0.5, 1e30])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_tiny_negative_and_huge_scales(bits: int, scale: float) -> None:
    torch.manual_seed(6)
    codes = torch.randint(-8, 8, (128, 20), dtype=torch.int8)
    scales = torch.full((2, 20), scale, dtype=torch.float32)
    weight = QuantizedWeight.from_codes(codes, scales, bits, 64)
    x = torch.randn(3, 128)
    assert_close(dequant_gemm(x, pack(weight)), x.double() @ weight.dequantize(torch.float64))


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_and_zero_point_is_exact(bits: int) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.arange(low, high, dtype=torch.int16).to(torch.int8)[None].repeat(16, 1)
    zeros = torch.tensor([[low], [-1], [0], [high - 1]]).to(torch.int8)
    for zero in zeros:
        weight = QuantizedWeight.from_codes(
            codes,
            torch.ones(1, codes.shape[1], dtype=torch.float16),
            bits,
            16,
            zero.expand(1, codes.shape[1]),
        )
        x = torch.eye(16, dtype=torch.float16)
        assert torch.equal(dequant_gemm(x, pack(weight)).float(), weight.dequantize())


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_beyond_2_31_elements_are_addressed(kind: str) -> None:
    # The second head lies beyond 2^31 elements; the pages between are never touched.
    gap = (1 << 31) + (1 << 20)
    bits = int(kind[3:])
    weights = [pack(quantized(Scheme(bits, 64), 128, 32, seed)) for seed in range(2)]
    codes = weights[0].qweight[0]
    try:
        buffer = torch.empty(gap + codes.numel(), dtype=codes.dtype)
    except RuntimeError as error:
        pytest.skip(f"cannot map {gap} elements: {error}")
    far = buffer.as_strided((2, *codes.shape), (gap, *codes.stride()))
    for head, weight in enumerate(weights):
        far[head] = weight.qweight[0]
    both = stack(weights)
    packed = TritonWeight(kind, far, both.scales, both.in_features, both.group_size)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(8))
    values = torch.stack([unpack(weight)[0].dequantize(torch.float64) for weight in weights])
    assert_close(dequant_gemm(x, packed), expected(x[None], values, None, False, None))


@pytest.mark.parametrize("features", [64, 192, 200])
def test_nf4_by_table(features: int) -> None:
    torch.manual_seed(features)
    codes = torch.randint(0, 16, (features, 31), dtype=torch.uint8)
    scales = torch.rand(-(-features // 64), 31)
    packed = poisoned(pack_nf4(codes, scales))
    x = torch.randn(1, 3, features).half()
    # The kernel rounds table values to fp16 before multiplying.
    assert_close(dequant_gemm(haloed(x), packed), expected(x, dequantize_nf4(packed), None, False, None))


def test_backend_prepares_runs_and_unpacks() -> None:
    from medusa_quant.kernels.backend import Problem

    weight = quantized(Scheme(4, 32, symmetric=False), 96, 24)
    backend = TritonBackend()
    problem = Problem.of(weight, torch.device("cpu"), torch.float16, "exact")
    assert backend.unavailable() is None
    assert backend.refuses(problem) is None
    prepared = backend.prepare(weight, problem)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(9)).half()
    out = torch.full((2, 24), float("nan"), dtype=torch.float16)
    assert prepared.run(x, out=out) is out
    assert_close(out, x.double() @ weight.dequantize(torch.float64))
    assert torch.equal(prepared.unpack().qweight, weight.qweight)
    assert prepared.nbytes == 128 * 24 // 2 + weight.scales.nbytes + 3 * 24
    bf16 = Problem.of(weight, torch.device("cpu"), torch.bfloat16, "exact")
    assert "bf16" in str(backend.refuses(bf16))
