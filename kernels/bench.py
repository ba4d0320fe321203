"""Benchmarks every backend on one weight shape: checked against fp64 first, then timed on cold weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from ..quantization import QuantizedWeight, Scheme, quantize_weight
from . import dispatch, gemlite
from .backend import Backend, Problem, Weight
from .timing import copies_for, median_time, read_bandwidth

# Model -> (K, N) of its per-head LM matrix and its ResBlock.
SHAPES = {
    "smollm2": [(576, 49152), (576, 576)],
    "7b": [(4096, 32000), (4096, 4096)],
    "13b": [(5120, 32000), (5120, 5120)],
    "33b": [(6656, 32000), (6656, 6656)],
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CHECKED_COLUMNS = 512
_PASSES = 5
# Relative error against fp64 of the dequantized weights; quantizing activations costs what it costs.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-2}
_INT8_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Result:
    """One measurement; without times where the check failed (see note).

    error: relative to fp64. bandwidth: GB/s read, measured just before and after. milliseconds: median.
    floor: milliseconds to read the weight once at that bandwidth. ratio: of the two.
    """

    K: int
    N: int
    M: int
    weight_dtype: str
    backend: str
    activation: str
    error: float
    bandwidth: float | None = None
    milliseconds: float | None = None
    floor: float | None = None
    ratio: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_shape(text: str) -> list[tuple[int, int]]:
    """(K, N) pairs of a model's name or `KxN`; InputError else."""
    if text.lower() in SHAPES:
        return SHAPES[text.lower()]
    parts = text.lower().split("x")
    if len(parts) == 2 and all(part.isdigit() and int(part) > 0 for part in parts):
        return [(int(parts[0]), int(parts[1]))]
    raise InputError("unknown shape", expected=f"{' | '.join(SHAPES)} | KxN", found=text)


def bench_shape(
    shape: tuple[int, int],
    rows: Sequence[int],
    weight_dtypes: Sequence[str],
    activation_dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Result]:
    """Measurements of one (K, N): each weight dtype on every backend that takes it, and dense baselines."""
    features, outputs = shape
    torch.manual_seed(0)
    source = torch.randn(outputs, features) / features**0.5
    for dtype in weight_dtypes:
        for weight, entry, make in _entries(source, dtype, activation_dtype, device):
            yield from _bench_entry(weight, entry, make, rows, activation_dtype, device)
    for dtype in ("bf16", "fp16", "fp32"):
        if dtype not in weight_dtypes:
            dense = source.to(DTYPES[dtype])
            entry = _Entry(dtype, "dense", f"{dtype} F.linear")
            yield from _bench_entry(
                dense,
                entry,
                partial(_dense, dense, device),
                rows,
                DTYPES[dtype],
                device,
            )


@dataclass(frozen=True)
class _Entry:
    weight_dtype: str
    backend: str
    activation: str


Run = Callable[[Tensor], Tensor]
Make = Callable[[], tuple[Run, int]]


def _entries(
    source: Tensor, dtype: str, activation_dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Weight, _Entry, Make]]:
    if dtype == "nf4":
        yield from _nf4_entries(source, device)
        return
    weight: Weight = (
        source.to(DTYPES[dtype]) if dtype in DTYPES else quantize_weight(source, Scheme.for_dtype(dtype))[0]
    )
    modes = ["exact"] if dtype in DTYPES else ["int8", "exact"]
    for mode in modes:
        problem = Problem.of(weight, device, activation_dtype, mode)
        for verdict in dispatch.judge(problem):
            if verdict.reason is not None:
                continue
            backend = dispatch.get_backend(verdict.name)
            probe = backend.prepare(weight, problem)
            if probe.activation != mode:
                continue  # it would repeat the exact run under another name
            yield weight, _Entry(dtype, verdict.name, mode), partial(_prepare, backend, weight, problem)
    if isinstance(weight, QuantizedWeight) and gemlite.takes(weight, device):
        yield weight, _Entry(dtype, "gemlite", "exact"), partial(_gemlite, weight, activation_dtype, device)


def _gemlite(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> tuple[Run, int]:
    prepared = gemlite.GemliteWeight(weight, dtype, device)
    return prepared.run, prepared.nbytes


def _prepare(backend: Backend, weight: Weight, problem: Problem) -> tuple[Run, int]:
    prepared = backend.prepare(weight, problem)
    return prepared.run, prepared.nbytes


def _nf4_entries(source: Tensor, device: torch.device) -> Iterator[tuple[Weight, _Entry, Make]]:
    if dispatch.unavailable("bitsandbytes") is not None:
        return
    from .bnb import Nf4Weight

    def make() -> tuple[Run, int]:
        prepared = Nf4Weight(source, device)
        return prepared.run, prepared.nbytes

    yield Nf4Weight(source, device).unpack(), _Entry("nf4", "bitsandbytes", "exact"), make


def _dense(weight: Tensor, device: torch.device) -> tuple[Run, int]:
    placed = weight.to(device, copy=True)
    return partial(_linear, placed), placed.nbytes


def _linear(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def _bench_entry(
    weight: Weight,
    entry: _Entry,
    make: Make,
    rows: Sequence[int],
    activation_dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Result]:
    runs = [make()]
    nbytes = runs[0][1]
    runs += [make() for _ in range(copies_for(nbytes, device) - 1)]
    features, outputs = (
        weight.shape if isinstance(weight, QuantizedWeight) else (weight.shape[1], weight.shape[0])
    )
    columns = torch.linspace(0, outputs - 1, min(_CHECKED_COLUMNS, outputs)).long()
    truth = _columns(weight, columns)
    for count in rows:
        x = torch.randn(count, features).to(activation_dtype).to(device)
        expected = x.double() @ truth.to(device)
        got = runs[0][0](x)[:, columns.to(device)].double()
        error = float((got - expected).norm() / expected.norm()) if count else 0.0
        limit = _INT8_TOLERANCE if entry.activation == "int8" else _TOLERANCE[activation_dtype]
        common = (
            features,
            outputs,
            count,
            entry.weight_dtype,
            entry.backend,
            entry.activation,
            error,
        )
        if not error <= limit:
            yield Result(*common, note=f"error above {limit:g}: not timed")
            continue
        calls = [partial(run, x) for run, _ in runs]
        # On both sides of each measurement: on shared machines bandwidth changes within seconds.
        before = read_bandwidth(device, _PASSES)
        milliseconds = median_time(calls, device) * 1e3
        bandwidth = (before + read_bandwidth(device, _PASSES)) / 2
        floor = nbytes / bandwidth * 1e3
        yield Result(*common, bandwidth / 1e9, milliseconds, floor, milliseconds / floor)


def _columns(weight: Weight, columns: Tensor) -> Tensor:
    """fp64 [K, columns] of the values a kernel should multiply by."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantize()[:, columns].double()
    return weight[columns.to(weight.device)].t().double().cpu()
