"""GPTQ and its relatives against dense references on small matrices, and where the Hessian is bad."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from medusa_quant.calibration import prepare_hessian, solve
from medusa_quant.calibration.gptq import gptq_codes
from medusa_quant.errors import InputError
from medusa_quant.quantization import Scheme, choose_params, quantize_weight
from medusa_quant.quantization.affine import quantize_groups
from medusa_quant.quantization.quantize import group_rows, ungroup_rows

SCHEMES = [Scheme(4, 32), Scheme(4, 32, symmetric=False), Scheme(4, -1), Scheme(8, -1), Scheme(4, 128)]
METHODS = ("rtn", "mse", "awq-clip", "gptq")


def inputs(features: int, count: int = 600, seed: int = 0) -> Tensor:
    """Correlated inputs of uneven size, as hidden states are: fp64 [count, features]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator, dtype=torch.float64)
    scale = torch.logspace(0, -1.5, features, dtype=torch.float64)
    return torch.randn(count, features, generator=generator, dtype=torch.float64) * scale @ mixing


def weights(rows: int, features: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)) * 0.05


def output_error(weight: Tensor, quantized: Tensor, x: Tensor) -> float:
    return float(((quantized.double() - weight.double()) @ x.t()).norm())


def dense_gptq(
    weight: np.ndarray, h: np.ndarray, scales: np.ndarray, order: np.ndarray, scheme: Scheme
) -> np.ndarray:
    """The optimal-brain-quantization update written plainly: after each feature the inverse Hessian of
    those left is computed anew, without Cholesky factors or blocks. Codes [n, K], symmetric."""
    low, high = scheme.code_range
    w, codes = weight.astype(np.float64).copy(), np.zeros(weight.shape)
    group = np.arange(w.shape[1]) // scheme.group_width(w.shape[1])
    left = list(order)
    while left:
        k, inverse = left[0], np.linalg.inv(h[np.ix_(left, left)])
        codes[:, k] = np.clip(np.rint(w[:, k] / scales[:, group[k]]), low, high)
        error = (w[:, k] - codes[:, k] * scales[:, group[k]]) / inverse[0, 0]
        w[:, left] -= np.outer(error, inverse[0])
        left = left[1:]
    return codes


@pytest.mark.parametrize("scheme", [Scheme(4, 16), Scheme(4, -1), Scheme(8, 16)], ids=str)
def test_gptq_equals_a_dense_reference(scheme: Scheme) -> None:
    x, weight = inputs(48), weights(20, 48)
    hessian = prepare_hessian(x.t() @ x / len(x))
    groups = group_rows(weight, scheme)
    scales, _ = choose_params(groups, scheme, "rtn", torch.float32)
    found = gptq_codes(weight, hessian, scales, None, scheme).numpy()
    expected = dense_gptq(
        weight.numpy(),
        hessian.matrix.double().numpy(),
        scales.double().numpy(),
        hessian.order.numpy(),
        scheme,
    )
    # fp32 against fp64: a value at the edge between two codes may fall either way, and shifts those after it.
    assert (found != expected).mean() < 0.02
    group = torch.arange(48) // scheme.group_width(48)
    dense = [torch.tensor(codes) * scales[:, group] for codes in (found, expected)]
    ours, reference = (output_error(weight, values, x) for values in dense)
    assert ours <= reference * 1.01


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_an_identity_hessian_makes_gptq_plain_rounding(scheme: Scheme) -> None:
    weight = weights(12, 64)
    groups = group_rows(weight, scheme)
    scales, zeros = choose_params(groups, scheme, "rtn", torch.float32)
    rounded = ungroup_rows(quantize_groups(groups, scales, zeros, scheme), 64)
    hessian = prepare_hessian(torch.eye(64, dtype=torch.float64))
    assert torch.equal(gptq_codes(weight, hessian, scales, zeros, scheme).float(), rounded)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_dearer_methods_are_never_worse(scheme: Scheme) -> None:
    x, weight = inputs(160), weights(40, 160)
    weight[3, 7] = 2.0
    hessian = prepare_hessian(x.t() @ x / len(x))
    errors = []
    for method in METHODS:
        quantized, error, report = solve(weight, scheme, method, hessian)
        errors.append(report.output_error)
        assert error.relative > 0
        own = output_error(weight, quantized.dequantize().t(), x)
        assert report.output_error > 0
        assert own > 0
    assert errors == sorted(errors, reverse=True)
    if scheme.bits == 4:
        assert errors[-1] < 0.9 * errors[0]


def test_rtn_and_mse_are_those_of_conversion() -> None:
    weight, hessian = weights(30, 96), prepare_hessian(torch.eye(96, dtype=torch.float64))
    quantized, _, _ = solve(weight, Scheme(4, 32), "rtn", hessian)
    plain, _ = quantize_weight(weight, Scheme(4, 32), "rtn")
    for name, part in plain.tensors().items():
        assert torch.equal(quantized.tensors()[name], part)


@pytest.mark.parametrize("method", METHODS)
def test_a_shard_is_a_slice_of_the_whole(method: str) -> None:
    """Output rows are solved apart: quantizing a column shard gives the slice, bit for bit."""
    x, weight = inputs(96), weights(1500, 96)
    hessian = prepare_hessian(x.t() @ x / len(x))
    whole, _, _ = solve(weight, Scheme(4, 32), method, hessian)
    for rows in (slice(0, 700), slice(900, 1500), slice(1023, 1025)):
        part, _, _ = solve(weight[rows].clone(), Scheme(4, 32), method, hessian)
        for name, value in part.tensors().items():
            assert torch.equal(value, whole.columns(rows).tensors()[name])


def test_a_rank_deficient_hessian_is_damped_and_says_how_much() -> None:
    x = inputs(64)[:3]
    hessian = prepare_hessian(x.t() @ x)
    assert hessian.damping > 0
    _, _, report = solve(weights(8, 64), Scheme(4, 32), "gptq", hessian)
    assert report.damping == hessian.damping


def test_one_token() -> None:
    x = inputs(64)[:1]
    quantized, _, _ = solve(weights(8, 64), Scheme(4, 32), "gptq", prepare_hessian(x.t() @ x))
    assert torch.isfinite(quantized.dequantize()).all()


def test_a_zero_hessian_is_plain_rounding() -> None:
    weight = weights(8, 64)
    hessian = prepare_hessian(torch.zeros(64, 64, dtype=torch.float64))
    assert hessian.dead == 64
    quantized, error, _ = solve(weight, Scheme(4, 32), "gptq", hessian)
    assert error.relative <= quantize_weight(weight, Scheme(4, 32))[1].relative * 1.01
    assert torch.isfinite(quantized.scales).all()


def test_dead_inputs_are_kept() -> None:
    x, weight = inputs(64), weights(8, 64)
    x[:, 5] = 0.0
    hessian = prepare_hessian(x.t() @ x / len(x))
    assert hessian.dead == 1
    quantized, _, report = solve(weight, Scheme(4, 32), "gptq", hessian)
    assert report.dead_inputs == 1
    assert (quantized.codes()[5] != 0).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite(bad: float) -> None:
    matrix = torch.eye(8, dtype=torch.float64)
    matrix[2, 3] = bad
    with pytest.raises(InputError, match="NaN or Inf"):
        prepare_hessian(matrix)


def test_an_indefinite_hessian() -> None:
    matrix = torch.tensor([[1.0, 9.0], [9.0, 1.0]], dtype=torch.float64)
    with pytest.raises(InputError, match="not positive semi-definite"):
        prepare_hessian(matrix)


def test_a_hessian_of_another_size() -> None:
    with pytest.raises(InputError, match="does not fit"):
        solve(weights(4, 32), Scheme(4, 32), "gptq", prepare_hessian(torch.eye(64, dtype=torch.float64)))


def test_low_rank_lowers_the_output_error() -> None:
    x, weight = inputs(96), weights(64, 96)
    hessian = prepare_hessian(x.t() @ x / len(x))
    plain, _, without = solve(weight, Scheme(4, -1), "gptq", hessian)
    corrected, _, report = solve(weight, Scheme(4, -1), "gptq", hessian, low_rank=8)
    assert corrected.low_rank_a is not None
    assert corrected.low_rank_a.shape == (96, 8)
    before, after = (output_error(weight, q.dequantize().t(), x) for q in (plain, corrected))
    assert after < 0.9 * before
    assert report.output_error < without.output_error
