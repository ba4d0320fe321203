"""Picks the backend for a weight, and says why."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import InputError
from ..quantization import QuantizedWeight
from .backend import Backend, PreparedWeight, Problem, Weight

BACKEND_VARIABLE = "MEDUSA_QUANT_BACKEND"
# Name -> module and class; imported when first considered, as some need optional packages.
_BACKENDS = {
    "cpu": ("cpu.backend", "CpuBackend"),
    "triton": ("triton.backend", "TritonBackend"),
    "torch_native": ("torch_native", "TorchNativeBackend"),
    "bitsandbytes": ("bnb", "BitsAndBytesBackend"),
    "reference": ("reference_backend", "ReferenceBackend"),
}


@dataclass(frozen=True)
class Verdict:
    """One backend on one problem: its cost (1.0 is the memory floor), or the reason it cannot run it."""

    name: str
    reason: str | None
    cost: float | None


def backend_names() -> list[str]:
    """All backends, whether or not this machine can run them."""
    return list(_BACKENDS)


@cache
def get_backend(name: str) -> Backend:
    """A backend by name; ImportError where its module needs a package that is not installed."""
    module, class_name = _BACKENDS[name]
    backend: Backend = getattr(import_module(f".{module}", __package__), class_name)()
    return backend


@cache
def unavailable(name: str) -> str | None:
    """Why this machine cannot run a backend at all, or None."""
    try:
        return get_backend(name).unavailable()
    except ImportError as error:
        return f"not importable: {error}"


def judge(problem: Problem) -> list[Verdict]:
    """Every backend's verdict on a problem: those that can run it first, cheapest first."""
    verdicts = []
    for name in _BACKENDS:
        reason = unavailable(name)
        if reason is None:
            reason = get_backend(name).refuses(problem)
        cost = get_backend(name).cost(problem) if reason is None else None
        verdicts.append(Verdict(name, reason, cost))
    return sorted(verdicts, key=lambda verdict: (verdict.cost is None, verdict.cost or 0.0))


def choose(problem: Problem, forced: str | None = None) -> tuple[Backend, str]:
    """The backend for a problem and, in a few words, why it.

    forced: a backend's name; default MEDUSA_QUANT_BACKEND. InputError if that backend is unknown or
    cannot run the problem.
    """
    forced = forced or os.environ.get(BACKEND_VARIABLE) or None
    if forced is not None:
        if forced not in _BACKENDS:
            raise InputError("unknown kernel backend", expected=" | ".join(_BACKENDS), found=forced)
        reason = unavailable(forced) or get_backend(forced).refuses(problem)
        if reason:
            raise InputError(
                f"kernel backend {forced} cannot run {_describe(problem)}: {reason}",
                fix=f"unset {BACKEND_VARIABLE} to let dispatch choose",
            )
        return get_backend(forced), "forced"
    verdicts = judge(problem)
    if problem.device.type == "cpu":
        _notice_missing_compiler()
    best = verdicts[0]
    return get_backend(best.name), f"cheapest of {sum(v.cost is not None for v in verdicts)} that can run it"


def prepare(
    weight: Weight,
    device: torch.device | str = "cpu",
    activation_dtype: torch.dtype = torch.float32,
    activation: str = "exact",
    backend: str | None = None,
    rows: int = 1,
) -> PreparedWeight:
    """Pack a weight once, at load, for the backend dispatch picks.

    weight: QuantizedWeight, or a float matrix [N, K] (out, in) in fp32, fp16 or bf16.
    activation: "exact", or "int8" to let a backend quantize activations dynamically (CPU). rows: the M
    to choose for. The result's `backend` says what was picked; `unpack()` gives the weight back.
    """
    problem = Problem.of(weight, torch.device(device), activation_dtype, activation, rows)
    return choose(problem, backend)[0].prepare(weight, problem)


_PREPARED: WeakKeyDictionary[QuantizedWeight, dict[object, PreparedWeight]] = WeakKeyDictionary()


def dequant_gemm(
    x: Tensor,
    weight: Weight | PreparedWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`residual + act(x @ w + bias)` [M, N] in x's dtype, accumulated in fp32.

    x: fp32, fp16 or bf16 [M, K], any strides. weight: what `prepare` returned; or a QuantizedWeight or
    float matrix [N, K], prepared on the spot (a QuantizedWeight keeps what was prepared for it).
    bias [N], residual [M, N] or None. activation: None or "silu". out: receives the result, or None.
    backend: a name, or None to let dispatch choose; only for a weight not prepared yet.
    Raises ValueError for shapes that do not belong together, InputError for a backend that cannot run.
    """
    if isinstance(weight, PreparedWeight):
        return weight.run(x, bias, activation, residual, out)
    if not isinstance(weight, QuantizedWeight):
        return prepare(weight, x.device, x.dtype, backend=backend, rows=x.shape[0]).run(
            x, bias, activation, residual, out
        )
    chosen = backend or os.environ.get(BACKEND_VARIABLE)
    kept = _PREPARED.setdefault(weight, {})
    key = (x.device, x.dtype, chosen)
    if key not in kept:
        kept[key] = prepare(weight, x.device, x.dtype, backend=backend)
    return kept[key].run(x, bias, activation, residual, out)


@cache
def _notice_missing_compiler() -> None:
    reason = unavailable("cpu")
    if reason:
        warnings.warn(f"CPU kernels unavailable ({reason}): using torch's, which are slower", stacklevel=2)


def _describe(problem: Problem) -> str:
    return f"{problem.weight_dtype} {problem.K}x{problem.N} with {problem.activation_dtype} activations"
