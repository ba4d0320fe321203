"""Every backend this machine has, held to fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, int8_activations, make_weight, oracle, poisoned, relative

from medusa_quant.kernels import dequant_gemm, prepare
from medusa_quant.kernels.backend import Problem
from medusa_quant.kernels.cpu.packing import ACTIVATION_GROUP
from medusa_quant.kernels.dispatch import backend_names, get_backend, unavailable
from medusa_quant.quantization import QuantizedWeight, Scheme, quantize_weight

BACKENDS = [name for name in backend_names() if unavailable(name) is None and name != "bitsandbytes"]
LIMITS = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def skip_refused(backend: str, weight: QuantizedWeight | torch.Tensor, dtype: torch.dtype) -> None:
    reason = get_backend(backend).refuses(Problem.of(weight, torch.device("cpu"), dtype))
    if reason:
        pytest.skip(reason)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_kernels_against_fp64(kind: str, data: st.DataObject) -> None:
    if unavailable("cpu"):
        pytest.skip(str(unavailable("cpu")))
    draw = data.draw
    group_size = draw(st.sampled_from([-1, 32, 64, 128])) if kind.startswith("int") else -1
    features = draw(st.sampled_from([1, 8, 24, 32, 96, 130, 160, 576]))
    outputs = draw(st.sampled_from([1, 13, 31, 32, 33, 100]))
    rows = draw(st.sampled_from([0, 1, 2, 3, 5, 6, 7, 13, 50]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    seed = draw(st.integers(0, 5))
    weight = make_weight(kind, features, outputs, group_size, draw(st.booleans()), seed)
    generator = torch.Generator().manual_seed(seed + 100)
    x = torch.randn(rows, features * 2, generator=generator).to(dtype)
    x = x[:, ::2] if draw(st.booleans()) else x[:, :features].contiguous()
    bias = torch.randn(outputs, generator=generator) if draw(st.booleans()) else None
    residual = torch.randn(rows, outputs, generator=generator).to(dtype) if draw(st.booleans()) else None
    activation = draw(st.sampled_from([None, "silu"]))
    threads = torch.get_num_threads()
    torch.set_num_threads(draw(st.integers(1, 4)))
    try:
        out = poisoned(rows, outputs, dtype=dtype)
        result = prepare(weight, activation_dtype=dtype, backend="cpu").run(
            x, bias, activation, residual, out
        )
    finally:
        torch.set_num_threads(threads)
    assert result is out
    assert relative(out, oracle(x, weight, bias, activation, residual)) < LIMITS[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_against_fp64(backend: str, kind: str, dtype: torch.dtype) -> None:
    for features, outputs, group_size in ((576, 100, 128), (96, 64, 32), (64, 32, -1)):
        weight = make_weight(kind, features, outputs, group_size if kind.startswith("int") else -1)
        skip_refused(backend, weight, dtype)
        prepared = prepare(weight, activation_dtype=dtype, backend=backend)
        generator = torch.Generator().manual_seed(1)
        for rows in (0, 1, 5, 17):
            x = torch.randn(rows, features, generator=generator).to(dtype)
            bias, residual = torch.randn(outputs, generator=generator), torch.randn(rows, outputs).to(dtype)
            found = prepared.run(x, bias, "silu", residual)
            assert found.dtype == dtype
            assert relative(found, oracle(x, weight, bias, "silu", residual)) < LIMITS[dtype]


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_activations_are_quantized_per_row_and_group(
    kind: str, group_size: int, symmetric: bool
) -> None:
    if unavailable("cpu"):
        pytest.skip(str(unavailable("cpu")))
    features = 320
    weight = make_weight(kind, features, 70, group_size, symmetric)
    x = torch.randn(9, features, generator=torch.Generator().manual_seed(2))
    x[3] = 0.0
    x[4, 7] = 500.0
    found = prepare(weight, activation="int8", backend="cpu").run(x)
    seen = int8_activations(x, ACTIVATION_GROUP if group_size == -1 else group_size)
    assert relative(found, oracle(seen, weight)) < 2e-3  # a tie may round either way in fp32
    assert torch.equal(found[3], torch.zeros(70))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["exact", "int8"])
def test_a_row_does_not_depend_on_its_batch(kind: str, activation: str) -> None:
    """Bit for bit, whatever the rows beside it and the number of threads."""
    if unavailable("cpu"):
        pytest.skip(str(unavailable("cpu")))
    weight = make_weight(kind, 192, 300, 64 if kind.startswith("int") else -1)
    prepared = prepare(weight, activation=activation, backend="cpu")
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(3))
    whole = prepared.run(x)
    threads = torch.get_num_threads()
    for count in (1, 2, 3, 4, 5, 6, 7, 12, 13, 31):
        torch.set_num_threads(1 + count % 2)
        assert torch.equal(prepared.run(x[9 : 9 + count]), whole[9 : 9 + count])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_unpack_is_the_inverse_of_prepare(backend: str, kind: str, symmetric: bool) -> None:
    weight = make_weight(kind, 160, 96, -1 if kind == "int8" else 32, symmetric)
    skip_refused(backend, weight, torch.float32)
    back = prepare(weight, backend=backend).unpack()
    if isinstance(weight, QuantizedWeight):
        assert isinstance(back, QuantizedWeight)
        for name, part in weight.tensors().items():
            assert torch.equal(back.tensors()[name], part), name
    else:
        assert isinstance(back, torch.Tensor)
        assert torch.equal(back, weight)


def test_act_order() -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(-8, 8, (128, 40), dtype=torch.int8, generator=generator)
    g_idx = (torch.arange(128) // 32)[torch.randperm(128, generator=generator)].int()
    weight = QuantizedWeight.from_codes(codes, torch.rand(4, 40, generator=generator), 4, 32, None, g_idx)
    x = torch.randn(7, 128, generator=generator)
    for backend in ("cpu", "reference"):
        if unavailable(backend) is None:
            assert relative(prepare(weight, backend=backend).run(x), oracle(x, weight)) < 1e-5


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_zero_scales_and_extreme_ones(kind: str) -> None:
    weight = make_weight(kind, 64, 40, 32)
    assert isinstance(weight, QuantizedWeight)
    weight.scales[:, 3] = 0.0
    weight.scales[:, 4] = 6e-8  # fp16's smallest
    weight.scales[:, 5] = 60000.0
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(5))
    found = prepare(weight).run(x)
    expected = oracle(x, weight)
    assert torch.equal(found[:, 3], torch.zeros(5))
    for column in (4, 5):
        assert relative(found[:, column], expected[:, column]) < 1e-5


def test_nan_stays_in_its_row() -> None:
    for kind in KINDS:
        weight = make_weight(kind, 64, 40, 32 if kind.startswith("int") else -1)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
        clean = prepare(weight).run(x)
        x[2, 3] = float("nan")
        dirty = prepare(weight).run(x)
        assert dirty[2].isnan().all()
        assert torch.equal(dirty[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_what_conversion_wrote_needs_no_requantizing() -> None:
    source = torch.randn(48, 96, generator=torch.Generator().manual_seed(7)) * 0.05
    weight, _ = quantize_weight(source, Scheme(4, 32))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(8))
    assert relative(dequant_gemm(x, weight), oracle(x, weight)) < 1e-5


@pytest.mark.parametrize(
    ("x", "arguments"),
    [
        (torch.zeros(2, 63), {}),
        (torch.zeros(2, 64, dtype=torch.float64), {}),
        (torch.zeros(64), {}),
        (torch.zeros(2, 64), {"bias": torch.zeros(31)}),
        (torch.zeros(2, 64), {"residual": torch.zeros(3, 32)}),
        (torch.zeros(2, 64), {"activation": "gelu"}),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_do_not_fit(backend: str, x: torch.Tensor, arguments: dict[str, object]) -> None:
    weight = make_weight("int8", 64, 32)
    skip_refused(backend, weight, torch.float32)
    with pytest.raises(ValueError, match="must be"):
        prepare(weight, backend=backend).run(x, **arguments)  # type: ignore[arg-type]
