"""What can be said of the backend on a machine without a device: capabilities, configurations, fakes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="triton is not installed")

from medusa_quant.kernels.backend import Problem
from medusa_quant.kernels.triton.backend import TritonBackend
from medusa_quant.kernels.triton.config import BUCKETS, FP32, TABLE, gemm_config, split_k
from medusa_quant.kernels.triton.heads import dequant_gemm, top_k
from medusa_quant.kernels.triton.weight import pack, stack
from medusa_quant.quantization import Scheme, quantize_weight

CUDA = torch.device("cuda", 0)


def problem(**changes: object) -> Problem:
    fields = {
        "device": CUDA,
        "activation_dtype": torch.float16,
        "activation": "exact",
        "weight_dtype": "int4",
        "group_size": 128,
        "symmetric": True,
        "act_order": False,
        "K": 4096,
        "N": 32000,
    }
    return Problem(**(fields | changes))  # type: ignore[arg-type]


def test_takes_what_the_kernels_take() -> None:
    backend = TritonBackend()
    assert backend.refuses(problem()) is None
    assert backend.refuses(problem(weight_dtype="int8", group_size=-1, symmetric=False)) is None
    assert backend.refuses(problem(activation_dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_dtype": "fp16"}, "not quantized"),
        ({"act_order": True}, "act-order"),
        ({"group_size": 20}, "multiple of 16"),
        ({"device": torch.device("cpu")}, "not on cpu"),
    ],
)
def test_refuses_with_a_reason(changes: dict[str, object], reason: str) -> None:
    assert reason in str(TritonBackend().refuses(problem(**changes)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_says_that_no_device_is_there() -> None:
    assert "device" in str(TritonBackend().unavailable())


def test_every_architecture_has_every_bucket() -> None:
    for arch, table in TABLE.items():
        assert tuple(table) == BUCKETS
        assert gemm_config(arch, 1, torch.float16) == table[16]
        assert gemm_config(arch, 17, torch.float16) == table[32]
        assert gemm_config(arch, 5000, torch.float16) == table[256]
        assert gemm_config(arch, 5000, torch.float32) == FP32


def test_k_is_split_only_where_a_launch_is_too_small() -> None:
    assert split_k("sm_90", 5, 32000, 4096) == 1
    assert split_k("sm_90", 1, 32000, 4096) == 1
    assert split_k("sm_90", 1, 4096, 4096) == 8
    assert split_k("sm_90", 1, 576, 576) == 1  # too short to split


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_fake_results_have_the_shape_of_the_real_ones(rows: int) -> None:
    weight, _ = quantize_weight(torch.randn(40, 96), Scheme(4, 32, symmetric=False))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(rows, 96, dtype=torch.bfloat16)
        one = dequant_gemm(x, pack(weight))
        both = dequant_gemm(x, stack([pack(weight)] * 2))
        values, columns = top_k(x, stack([pack(weight)] * 2), 5)
    assert (one.shape, one.dtype) == ((rows, 40), torch.bfloat16)
    assert both.shape == (2, rows, 40)
    assert (values.shape, values.dtype) == ((2, rows, 5), torch.float32)
    assert (columns.shape, columns.dtype) == ((2, rows, 5), torch.int64)


def test_arguments_that_do_not_fit_are_named() -> None:
    weight = pack(quantize_weight(torch.randn(40, 96), Scheme(4, 32))[0])
    x = torch.randn(2, 96).half()
    with pytest.raises(ValueError, match=r"x must be \[M, 96\]"):
        dequant_gemm(x[:, :95], weight)
    with pytest.raises(ValueError, match="fp16, bf16 or fp32"):
        dequant_gemm(x.double(), weight)
    with pytest.raises(ValueError, match="bias"):
        dequant_gemm(x, weight, bias=torch.randn(39))
    with pytest.raises(ValueError, match="residual"):
        dequant_gemm(x, weight, residual=x)
    with pytest.raises(ValueError, match="silu"):
        dequant_gemm(x, weight, activation="relu")
