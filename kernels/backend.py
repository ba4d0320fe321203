"""What a kernel backend offers. A backend packs a weight once (`prepare`), then multiplies with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..quantization import QuantizedWeight
from .reference import check_arguments, weight_shape

Weight: TypeAlias = QuantizedWeight | Tensor
ACTIVATION_MODES = ("exact", "int8")


@dataclass(frozen=True)
class Problem:
    """What dispatch chooses by.

    device: where x and the weight live. activation_dtype: x's dtype. activation: "exact", or "int8" where x
    may be quantized dynamically. weight_dtype: int4, int8, fp32, fp16 or bf16. group_size: -1 per channel.
    K, N: the weight's input and output features. rows: M, as expected at run time.
    """

    device: torch.device
    activation_dtype: torch.dtype
    activation: str
    weight_dtype: str
    group_size: int
    symmetric: bool
    act_order: bool
    K: int
    N: int
    rows: int = 1

    @classmethod
    def of(
        cls,
        weight: Weight,
        device: torch.device,
        activation_dtype: torch.dtype,
        activation: str = "exact",
        rows: int = 1,
    ) -> Problem:
        if activation not in ACTIVATION_MODES:
            raise ValueError(f"activation must be one of {ACTIVATION_MODES}, got {activation!r}")
        features, outputs = weight_shape(weight)
        if isinstance(weight, QuantizedWeight):
            symmetric, act_order = weight.zeros is None, weight.g_idx is not None
            dtype, group = weight.scheme.dtype, weight.group_size
        else:
            symmetric, act_order, group = True, False, -1
            dtype = DTYPE_NAMES[weight.dtype]
        return cls(
            device, activation_dtype, activation, dtype, group, symmetric, act_order, features, outputs, rows
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of codes and fp16 scales that one pass over the weight must read."""
        per_value = {"int4": 0.5, "int8": 1.0, "nf4": 0.5, "fp32": 4.0}.get(self.weight_dtype, 2.0)
        codes = self.K * self.N * per_value
        if self.weight_dtype not in ("int4", "int8"):
            return codes
        groups = 1 if self.group_size < 1 else -(-self.K // self.group_size)
        return codes + groups * self.N * (2 if self.symmetric else 3)


DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class PreparedWeight(ABC):
    """A weight packed for one backend. `w` may be used from several threads at once.

    backend: name. in_features K, out_features N. activation: "exact" or "int8", what `run` does to x.
    nbytes: bytes one pass reads.
    """

    backend: str
    in_features: int
    out_features: int
    activation: str
    nbytes: int

    @abstractmethod
    def run(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As `reference.dequant_gemm`; `out` [M, N] in x's dtype receives the result where given."""

    @abstractmethod
    def unpack(self) -> Weight:
        """The weight that was packed, bit for bit: the inverse of `prepare`."""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.in_features, self.out_features

    def check(self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> None:
        check_arguments(x, self.shape, bias, activation, residual)


class Backend(ABC):
    """One way to run a dequant-GEMM."""

    name: str

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this machine cannot run it, in a few words, or None."""

    @abstractmethod
    def refuses(self, problem: Problem) -> str | None:
        """Why it cannot run this problem although available, or None."""

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Estimated time in units of reading the weight once from memory (1.0 is the floor)."""

    @abstractmethod
    def prepare(self, weight: Weight, problem: Problem) -> PreparedWeight:
        """Pack a weight for a problem it does not refuse."""
