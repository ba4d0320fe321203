"""Quantization against a plain fp64 oracle, and the bit-exactness of packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_quant.quantization import QuantizedWeight, Scheme, quantize_weight
from medusa_quant.quantization.packing import pack_int4, unpack_int4
from medusa_quant.quantization.params import choose_params
from medusa_quant.quantization.quantize import NonFiniteError, group_rows, ungroup_rows

SCHEMES = [
    Scheme(bits, group_size, symmetric, full_range)
    for bits in (4, 8)
    for group_size in (-1, 32, 128)
    for symmetric, full_range in ((True, False), (True, True), (False, False))
]


def random_weight(rows: int, features: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)) * 0.03


@pytest.mark.parametrize("features", [1, 2, 7, 64])
def test_pack_int4_is_low_nibble_first_along_k(features: int) -> None:
    codes = torch.randint(-8, 8, (features, 5), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    packed = pack_int4(codes)
    padded = np.concatenate([codes.numpy(), np.zeros((features % 2, 5), np.int8)]).astype(np.int64) + 8
    assert packed.numpy().tolist() == (padded[0::2] + 16 * padded[1::2]).tolist()
    assert torch.equal(unpack_int4(packed, features), codes)


@pytest.mark.parametrize("code", [-9, 8])
def test_pack_int4_refuses_codes_out_of_range(code: int) -> None:
    with pytest.raises(ValueError, match=r"\[-8, 7\]"):
        pack_int4(torch.tensor([[0], [code]], dtype=torch.int8))


@given(
    rows=st.integers(1, 9),
    features=st.integers(1, 200),
    width=st.sampled_from([1, 32, 128, 200]),
    seed=st.integers(0, 99),
)
def test_grouping_is_undone(rows: int, features: int, width: int, seed: int) -> None:
    weight = random_weight(rows, features, seed)
    assert torch.equal(ungroup_rows(group_rows(weight, Scheme(8, width)), features), weight)


def oracle(weight: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> np.ndarray:
    """Codes [N, K] by the definition: round(w / s) + z in fp64, clamped."""
    low, high = scheme.code_range
    group = np.arange(weight.shape[1]) // scheme.group_width(weight.shape[1])
    s = scales.double().numpy().T[:, group]
    z = 0 if zeros is None else zeros.double().numpy().T[:, group]
    return np.clip(np.rint(weight.double().numpy() / s) + z, low, high)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("features", [32, 96, 576 // 4, 129])
def test_codes_are_the_nearest_for_their_scales(scheme: Scheme, features: int) -> None:
    weight = random_weight(40, features)
    quantized, error = quantize_weight(weight, scheme)
    expected = oracle(weight, scheme, quantized.scales, quantized.zeros)
    found = quantized.codes().t().double().numpy()
    # fp32 and fp64 quotients may fall on different sides of a tie: by one code, hardly ever.
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 1e-3
    stored = quantized.dequantize().t()
    relative = float((stored.double() - weight.double()).norm() / weight.double().norm())
    assert error.relative == pytest.approx(relative, rel=1e-4)
    assert error.max == pytest.approx(float((stored - weight).abs().max()), rel=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_error_is_bounded_by_the_step(scheme: Scheme) -> None:
    weight = random_weight(16, 160)
    quantized, _ = quantize_weight(weight, scheme, scale_dtype=torch.float32)
    step = quantized.scales.abs()[quantized.group_index()].t()
    worst = ((quantized.dequantize().t() - weight).abs() / step).max()
    # An asymmetric zero point is itself rounded, and the full range has no code for the extreme's opposite:
    # either may cost the ends of the range another half step.
    assert worst <= (0.51 if scheme.symmetric and not scheme.full_range else 1.01)


def test_full_range_keeps_the_extreme_exactly() -> None:
    weight = random_weight(8, 64).half().float()
    weight[:, 0] = weight.abs().amax(1) * 2
    quantized, _ = quantize_weight(weight, Scheme(4, -1, full_range=True), scale_dtype=torch.float32)
    assert quantized.codes()[0].tolist() == [-8] * 8
    assert torch.allclose(quantized.dequantize()[0], weight[:, 0], rtol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_mse_is_never_worse_than_rtn(scheme: Scheme) -> None:
    weight = random_weight(32, 128)
    weight[0, 0] = 3.0
    errors = {method: quantize_weight(weight, scheme, method)[1].relative for method in ("rtn", "mse")}
    assert errors["mse"] <= errors["rtn"]
    if scheme.bits == 4:
        assert errors["mse"] < errors["rtn"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-6, 1e-40, -3e-39, 65504.0, 3e38])
def test_scales_of_extreme_groups(scheme: Scheme, value: float) -> None:
    weight = torch.full((4, 160), value)
    quantized, error = quantize_weight(weight, scheme)
    assert torch.isfinite(quantized.scales).all()
    assert (quantized.scales != 0).all()
    assert torch.isfinite(quantized.dequantize()).all()
    if value == 0.0:
        assert (quantized.scales == 1).all()
        assert (quantized.codes() == 0).all()
    elif abs(value) > 1e-37:
        assert error.relative < 0.01


def test_scales_that_underflow_fp16_are_kept_in_fp32() -> None:
    weight = random_weight(8, 64)
    assert quantize_weight(weight, Scheme(4, 32))[0].scales.dtype == torch.float16
    weight[3] *= 1e-6
    quantized, error = quantize_weight(weight, Scheme(4, 32))
    assert quantized.scales.dtype == torch.float32
    assert error.relative < 0.2


def test_a_single_outlier_costs_only_its_own_group() -> None:
    weight = random_weight(4, 256)
    clean = quantize_weight(weight, Scheme(4, 64))[0].dequantize().t()
    weight[1, 70] = 1e4
    dirty = quantize_weight(weight, Scheme(4, 64), scale_dtype=torch.float16)[0].dequantize().t()
    touched = torch.zeros_like(weight, dtype=torch.bool)
    touched[1, 64:128] = True
    assert torch.equal(dirty[~touched], clean[~touched])
    assert abs(float(dirty[1, 70]) - 1e4) < 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_nonfinite_values_have_no_code(scheme: Scheme, bad: float) -> None:
    weight = random_weight(5, 64)
    weight[4, 63] = bad
    with pytest.raises(NonFiniteError):
        quantize_weight(weight, scheme)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 70),
    features=st.integers(1, 150),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    transposed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_rows_are_independent(
    rows: int, features: int, scheme: Scheme, dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    """Quantizing some rows of a matrix gives those rows of the quantized matrix, bit for bit."""
    weight = random_weight(rows, features, seed).to(dtype)
    stored = weight.t().contiguous().t() if transposed else weight
    whole, _ = quantize_weight(stored, scheme, scale_dtype=torch.float32)
    part = slice(rows // 3, rows // 3 + max(1, rows // 2))
    piece, _ = quantize_weight(weight[part].clone(), scheme, scale_dtype=torch.float32)
    expected = whole.columns(part)
    assert piece.tensors().keys() == expected.tensors().keys()
    for name, tensor in piece.tensors().items():
        assert torch.equal(tensor, expected.tensors()[name])


def test_choose_params_keeps_to_the_stored_precision() -> None:
    groups = group_rows(random_weight(64, 128), Scheme(4, 32))
    scales, _ = choose_params(groups, Scheme(4, 32), "rtn", torch.float16)
    assert scales.dtype == torch.float16


def test_dequantize_follows_the_formula_with_act_order() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (64, 6), dtype=torch.int8, generator=generator)
    scales = torch.rand(2, 6, generator=generator)
    zeros = torch.randint(-8, 8, (2, 6), dtype=torch.int8, generator=generator)
    g_idx = torch.randperm(64, generator=generator).int() % 2
    weight = QuantizedWeight.from_codes(codes, scales, 4, 32, zeros, g_idx)
    expected = (codes.float() - zeros[g_idx.long()].float()) * scales[g_idx.long()]
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize(
    "broken",
    [{"scales": torch.ones(3, 6)}, {"zeros": torch.zeros(2, 5, dtype=torch.int8)}, {"in_features": 60}],
)
def test_parts_that_do_not_belong_together(broken: dict[str, object]) -> None:
    weight = QuantizedWeight.from_codes(torch.zeros(64, 6, dtype=torch.int8), torch.ones(2, 6), 4, 32)
    fields = {
        "qweight": weight.qweight,
        "scales": weight.scales,
        "in_features": 64,
        "bits": 4,
        "group_size": 32,
        **broken,
    }
    with pytest.raises(ValueError, match="must"):
        QuantizedWeight(**fields)  # type: ignore[arg-type]
