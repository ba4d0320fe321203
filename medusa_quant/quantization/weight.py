"""`QuantizedWeight`: the one in-memory form of an integer weight, shared by writer, reader and kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .packing import pack_int4, unpack_int4
from .scheme import PER_CHANNEL, Scheme

_BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """An integer weight of K input and N output features: `w[k, n] = (q[k, n] - z[g, n]) * s[g, n]`,
    where g = g_idx[k], or k // group_size without g_idx; plus (a @ b)[k, n] with a low-rank correction.

    qweight: int8 [K, N] for 8 bits; uint8 [ceil(K/2), N] for 4 bits (see `packing`).
    scales: fp16 or fp32 [G, N]; G = ceil(K / group_size), 1 per channel. The last group may be short.
    zeros: int8 [G, N] in the domain of signed codes, or None when symmetric.
    g_idx: int32 [K], the group of each input feature (GPTQ act-order checkpoints only), or None.
    in_features: K. bits: 4 or 8. group_size: -1 for one scale per output channel.
    low_rank_a, low_rank_b: fp16 [K, R] and [R, N], a correction added to the weight; both or neither.
    """

    qweight: Tensor
    scales: Tensor
    in_features: int
    bits: int
    group_size: int = PER_CHANNEL
    zeros: Tensor | None = None
    g_idx: Tensor | None = None
    low_rank_a: Tensor | None = None
    low_rank_b: Tensor | None = None

    def __post_init__(self) -> None:
        rows = (self.in_features + 1) // 2 if self.bits == 4 else self.in_features
        expected = torch.uint8 if self.bits == 4 else torch.int8
        if self.qweight.dtype != expected or self.qweight.ndim != 2 or self.qweight.shape[0] != rows:
            raise ValueError(
                f"qweight must be {expected} [{rows}, N], got {self.qweight.dtype} {list(self.qweight.shape)}"
            )
        if self.scales.ndim != 2 or self.scales.shape[1] != self.out_features:
            raise ValueError(f"scales must be [G, {self.out_features}], got {list(self.scales.shape)}")
        groups = self.scheme.num_groups(self.in_features)
        if self.g_idx is None and self.scales.shape[0] != groups:
            raise ValueError(f"scales must have {groups} groups, got {self.scales.shape[0]}")
        if self.zeros is not None and (
            self.zeros.shape != self.scales.shape or self.zeros.dtype != torch.int8
        ):
            raise ValueError(f"zeros must be int8 {list(self.scales.shape)}, got {list(self.zeros.shape)}")
        if self.g_idx is not None and self.g_idx.shape != (self.in_features,):
            raise ValueError(f"g_idx must be [{self.in_features}], got {list(self.g_idx.shape)}")
        self._check_low_rank()

    def _check_low_rank(self) -> None:
        a, b = self.low_rank_a, self.low_rank_b
        if a is None and b is None:
            return
        if a is None or b is None:
            raise ValueError("low_rank_a and low_rank_b belong together")
        rank = a.shape[-1]
        if a.shape != (self.in_features, rank) or b.shape != (rank, self.out_features):
            raise ValueError(
                f"low-rank factors must be [{self.in_features}, R] and [R, {self.out_features}], "
                f"got {list(a.shape)} and {list(b.shape)}"
            )

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        bits: int,
        group_size: int = PER_CHANNEL,
        zeros: Tensor | None = None,
        g_idx: Tensor | None = None,
    ) -> QuantizedWeight:
        """Build from signed int8 codes [K, N]; the other tensors as in the class docstring."""
        qweight = pack_int4(codes) if bits == 4 else codes
        return cls(qweight, scales, codes.shape[0], bits, group_size, zeros, g_idx)

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.in_features, self.out_features

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.bits, self.group_size, symmetric=self.zeros is None)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored parts."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The stored parts by the name of their file: qweight, scales and, where present, zeros, g_idx,
        low_rank_a and low_rank_b."""
        parts = {
            "qweight": self.qweight,
            "scales": self.scales,
            "zeros": self.zeros,
            "g_idx": self.g_idx,
            "low_rank_a": self.low_rank_a,
            "low_rank_b": self.low_rank_b,
        }
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def columns(self, outputs: slice) -> QuantizedWeight:
        """The same weight of some output features only: codes and scales as they are (views)."""
        parts: dict[str, Any] = {
            name: tensor[:, outputs]
            for name, tensor in self.tensors().items()
            if name not in ("g_idx", "low_rank_a")
        }
        return replace(self, **parts)

    def codes(self) -> Tensor:
        """Signed codes int8 [K, N]."""
        return unpack_int4(self.qweight, self.in_features) if self.bits == 4 else self.qweight

    def group_index(self) -> Tensor:
        """int64 [K]: the group of each input feature."""
        if self.g_idx is not None:
            return self.g_idx.long()
        features = torch.arange(self.in_features, device=self.qweight.device)
        return features // max(1, self.scheme.group_width(self.in_features))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [K, N], computed in fp32 and rounded once to `dtype`."""
        group = self.group_index()
        result = torch.empty(self.shape, dtype=dtype, device=self.qweight.device)
        # In blocks of rows (an even number, for int4): the fp32 temporaries stay small.
        step = max(2, _BLOCK_ELEMENTS // max(1, self.out_features) // 2 * 2)
        for start in range(0, self.in_features, step):
            rows = slice(start, min(start + step, self.in_features))
            values = self._code_rows(rows).to(torch.float32)
            if self.zeros is not None:
                values -= self.zeros[group[rows]].float()
            values.mul_(self.scales[group[rows]].float())
            if self.low_rank_a is not None and self.low_rank_b is not None:
                values += self.low_rank_a[rows].float() @ self.low_rank_b.float()
            result[rows] = values
        return result

    def _code_rows(self, rows: slice) -> Tensor:
        if self.bits == 8:
            return self.qweight[rows]
        packed = self.qweight[rows.start // 2 : (rows.stop + 1) // 2]
        return unpack_int4(packed, rows.stop - rows.start)
