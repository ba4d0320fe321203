"""Resolving a conversion before any data is read: every tensor, what becomes of it, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoints.base import (
    base_lm_head,
    check_fits,
    differing_lm_heads,
    with_own_lm_heads,
    without_lm_heads,
)
from .checkpoints.heads import BIAS, LM_HEAD, TOKEN_MAP, WEIGHT, HeadTensor, MedusaHeads
from .errors import InputError
from .quantization import PER_CHANNEL, QuantizedWeight, Scheme, parse_dtype
from .quantization.scheme import INT_DTYPES
from .workspace.layouts import Layout, layout_named
from .workspace.sharding import LM_HEAD_SPLITS, Shard, check_shardable, padded_vocab, shard_of
from .workspace.stream import STORED_DTYPES, stored_dtype_name

METHODS = ("rtn", "mse", "awq-clip", "gptq")
# Methods that look at a layer's inputs, not only at its weights.
_NEED_CALIBRATION = ("awq-clip", "gptq")


@dataclass(frozen=True)
class Choice:
    """The dtype of one kind of matrix of one head. role: resblock.weight or lm_head.weight."""

    head: int
    role: str
    dtype: str
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.role not in (WEIGHT, LM_HEAD):
            raise InputError("no such matrix", expected=f"{WEIGHT} or {LM_HEAD}", found=self.role)
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.dtype in INT_DTYPES:
            Scheme.for_dtype(self.dtype, self.group_size)
        elif self.group_size is not None:
            raise InputError(f"{self.dtype} has no group size", found=self.group_size)


@dataclass(frozen=True)
class ConvertOptions:
    """What a user asks of a conversion; see `medusa-quant convert --help`.

    dtype None keeps the codes and dtypes of an already quantized source. group_size None takes the
    dtype's default (int8 per channel, int4 128). choices: matrices that get another dtype than `dtype`.
    calibration: statistics of the base's states. low_rank: rank of a correction beside the codes.
    """

    dtype: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    full_range: bool = False
    method: str = "rtn"
    tp: int = 1
    lm_head_split: str = "vocab"
    layout: str = "turbomind"
    base: str | None = None
    dedupe_lm_head: bool = False
    on_overflow: str = "error"
    allow_nonfinite: bool = False
    gptq_format: str = "gptq"
    choices: tuple[Choice, ...] = ()
    calibration: str | None = None
    low_rank: int = 0

    def __post_init__(self) -> None:
        choices = {
            "method": METHODS,
            "lm_head_split": LM_HEAD_SPLITS,
            "on_overflow": ("error", "clip"),
            "gptq_format": ("gptq", "gptq_v2"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"bad {flag}", expected=" | ".join(allowed), found=getattr(self, name))
        if self.tp < 1:
            raise InputError("bad --tp", expected="1 or more", found=self.tp)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.calibration is None and (self.method in _NEED_CALIBRATION or self.low_rank):
            asked = "--low-rank" if self.low_rank else f"--method {self.method}"
            raise InputError(
                f"{asked} needs statistics of the base's states",
                fix="run `medusa-quant calibrate`, and pass --calibration STATS",
            )
        if self.low_rank < 0:
            raise InputError("bad --low-rank", expected="0 or more", found=self.low_rank)
        layout_named(self.layout)

    def for_tensor(self, tensor: HeadTensor) -> ConvertOptions:
        """These options with the dtype and group size of one matrix, where it was given its own."""
        for choice in self.choices:
            if choice.head == tensor.id.head and choice.role == tensor.id.role:
                return replace(self, dtype=choice.dtype, group_size=choice.group_size)
        return self


@dataclass(frozen=True)
class PlannedPart:
    """One stored part of one rank: its name, the file it lies in, shape and dtype as stored."""

    name: str
    file: str
    rank: int
    part: str
    shape: list[int]
    dtype: str
    shard: Shard

    @property
    def bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * STORED_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PlannedTensor:
    """What becomes of one source tensor. scheme: set where it is quantized now; method: rtn, keep, cast..."""

    tensor: HeadTensor
    dtype: str
    scheme: Scheme | None
    method: str
    parts: list[PlannedPart]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """A conversion, resolved. heads: what is converted (LM matrices from the base filled in)."""

    heads: MedusaHeads
    options: ConvertOptions
    layout: Layout
    tensors: list[PlannedTensor]
    warnings: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def fp16_bytes(self) -> int:
        """What the same tensors take at fp16, without sharding or padding."""
        return sum(2 * tensor.tensor.numel for tensor in self.tensors)

    @property
    def padded_vocab_size(self) -> int | None:
        lm_head = self.heads.lm_head(0)
        if lm_head is None:
            return None
        if self.layout.key_format is not None or self.options.lm_head_split == "hidden":
            return lm_head.shape[0]
        return padded_vocab(lm_head.shape[0], self.options.tp)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a stored part, as `--dry-run` shows them."""
        for planned in self.tensors:
            for part in planned.parts:
                yield {
                    "source": planned.tensor.key,
                    "tensor": str(planned.tensor.id),
                    "from": planned.tensor.dtype,
                    "method": planned.method,
                    "name": part.name,
                    "file": part.file,
                    "rank": part.rank,
                    "shape": part.shape,
                    "dtype": part.dtype,
                    "split": part.shard.axis,
                    "start": part.shard.start,
                    "stop": part.shard.stop,
                    "bytes": part.bytes,
                }

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": str(self.heads.path),
            "format": self.heads.format,
            "options": asdict(self.options),
            "num_heads": self.heads.num_heads,
            "num_layers": self.heads.num_layers,
            "hidden_size": self.heads.hidden_size,
            "vocab_size": self.heads.vocab_size,
            "shared_lm_head": self.heads.shared_lm_head,
            "parts": list(self.rows()),
            "bytes": self.bytes,
            "fp16_bytes": self.fp16_bytes,
            "warnings": self.warnings,
        }


def make_plan(heads: MedusaHeads, options: ConvertOptions) -> Plan:
    """Resolve every tensor. Raises InputError for anything that could not be carried out."""
    layout = layout_named(options.layout)
    warnings = list(heads.warnings)
    heads = _resolve_lm_head(heads, options, warnings)
    options = _resolve_dtype(heads, options)
    _check_choices(heads, options)
    if layout.key_format is not None and options.tp != 1:
        raise InputError(
            f"layout {layout.name} holds whole matrices, not ranks",
            expected="--tp 1",
            found=f"--tp {options.tp}",
            fix="use layout turbomind or safetensors for tensor parallel",
        )
    if layout.name == "gptq" and any(t.id.role == TOKEN_MAP for t in heads):
        raise InputError("layout gptq has no place for a token_map", fix="use layout vllm or turbomind")
    if layout.name == "gptq" and options.choices:
        raise InputError("layout gptq holds one dtype", fix="use layout turbomind or safetensors for a mix")
    if layout.name == "gptq" and options.dtype not in INT_DTYPES:
        raise InputError("layout gptq holds int4 or int8", found=options.dtype, fix="pass --dtype int4")
    return Plan(heads, options, layout, [_plan_tensor(t, heads, options, layout) for t in heads], warnings)


def _resolve_lm_head(heads: MedusaHeads, options: ConvertOptions, warnings: list[str]) -> MedusaHeads:
    if options.base is None:
        if options.dedupe_lm_head:
            raise InputError("--dedupe-lm-head compares with the base", fix="pass --base MODEL")
        return heads
    base = base_lm_head(options.base)
    check_fits(heads, base)
    if heads.shared_lm_head:
        return (
            replace(heads, vocab_size=base.shape[0])
            if options.dedupe_lm_head
            else with_own_lm_heads(heads, base)
        )
    if options.dedupe_lm_head:
        differing = differing_lm_heads(heads, base)
        if differing:
            raise InputError(
                f"the LM matrices of heads {', '.join(map(str, differing))} differ from the base's",
                file=heads.path,
                fix="drop --dedupe-lm-head",
            )
        return without_lm_heads(heads)
    if not any(tensor.quantized for tensor in heads) and not differing_lm_heads(heads, base):
        size = heads.num_heads * heads.lm_head(0).numel * 2 / 1e6  # type: ignore[union-attr]
        warnings.append(
            "every LM matrix equals the base's: --dedupe-lm-head would share it "
            f"and save {size:.0f} MB at fp16"
        )
    return heads


def _resolve_dtype(heads: MedusaHeads, options: ConvertOptions) -> ConvertOptions:
    matrices = [tensor for tensor in heads if tensor.id.role not in (BIAS, TOKEN_MAP)]
    found = sorted({tensor.dtype for tensor in matrices})
    quantized = [tensor for tensor in matrices if tensor.quantized]
    if options.dtype is None:
        from_workspace = heads.format.startswith("medusa-quant")
        if not quantized and not from_workspace:
            raise InputError("no --dtype given", file=heads.path, expected="fp32, fp16, bf16, int8 or int4")
        common = quantized[0].dtype if quantized else found[0]
        # A mix stays the mix it is.
        others = {(t.id.head, t.id.role): t for t in matrices if t.dtype != common}
        choices = [
            Choice(head, role, tensor.dtype, tensor.group_size) for (head, role), tensor in others.items()
        ]
        return replace(options, dtype=common, choices=tuple(choices))
    for tensor in quantized:
        same = tensor.dtype == options.dtype and options.group_size in (None, tensor.group_size)
        if options.dtype in INT_DTYPES and not same:
            target = (
                options.dtype if options.group_size is None else f"{options.dtype} g {options.group_size}"
            )
            raise InputError(
                f"{tensor.id} is already {tensor.dtype} g {tensor.group_size}: quantizing it again "
                f"to {target} would lose twice",
                file=tensor.file,
                fix="convert from the original checkpoint",
            )
    return options


def _check_choices(heads: MedusaHeads, options: ConvertOptions) -> None:
    for choice in options.choices:
        if not any(tensor.id.head == choice.head and tensor.id.role == choice.role for tensor in heads):
            raise InputError(
                f"the plan names head {choice.head} {choice.role}, which these heads do not have",
                file=heads.path,
                found=f"{heads.num_heads} heads, LM matrices {'shared' if heads.shared_lm_head else 'own'}",
            )


def _plan_tensor(
    tensor: HeadTensor, heads: MedusaHeads, options: ConvertOptions, layout: Layout
) -> PlannedTensor:
    dtype, scheme, method = _target(tensor, options.for_tensor(tensor), layout)
    low_rank = options.low_rank if scheme else tensor.low_rank
    if scheme and low_rank > min(tensor.shape):
        raise InputError(
            f"{tensor.id}: --low-rank exceeds its size",
            expected=f"at most {min(tensor.shape)}",
            found=low_rank,
        )
    stand_in = _stand_in(tensor, dtype, scheme, low_rank)
    group_size = scheme.group_size if scheme else tensor.group_size
    codes = isinstance(stand_in, QuantizedWeight) and layout.key_format is None
    check_shardable(
        str(tensor.id),
        tensor.id.role,
        tensor.shape,
        options.tp,
        options.lm_head_split,
        PER_CHANNEL if tensor.act_order else group_size if codes else None,
        int(dtype[3:]) if codes else 0,
    )
    parts = []
    for rank in range(options.tp):
        shard = shard_of(tensor.id.role, tensor.shape, rank, options.tp, options.lm_head_split)
        try:
            stored = layout.parts(tensor.id, stand_in, shard, options.gptq_format)
        except ValueError as error:
            raise InputError(f"{tensor.id}: {error}", file=tensor.file, key=tensor.key) from error
        for part, value in stored.items():
            name = layout.name_of(tensor.id, heads.num_layers, rank, part)
            file = layout.file_of(name, rank)
            stored_dtype = stored_dtype_name(value.dtype)
            parts.append(PlannedPart(name, file, rank, part, list(value.shape), stored_dtype, shard))
    return PlannedTensor(tensor, dtype, scheme, method, parts)


def _target(tensor: HeadTensor, options: ConvertOptions, layout: Layout) -> tuple[str, Scheme | None, str]:
    """Target dtype, scheme if it is quantized now, and the method's name."""
    assert options.dtype is not None
    if tensor.id.role == TOKEN_MAP:
        return "int32", None, "copy"
    if tensor.id.role == BIAS:
        # Biases are small and added in full precision: integer weights leave them in their own dtype.
        dtype = tensor.dtype if options.dtype in INT_DTYPES else options.dtype
        dtype = "fp32" if dtype == "fp64" else dtype
        return dtype, None, "copy" if dtype == tensor.dtype else "cast"
    if tensor.quantized:
        kept = options.dtype == tensor.dtype
        return (tensor.dtype, None, "keep") if kept else (options.dtype, None, "dequantize")
    if options.dtype in INT_DTYPES:
        scheme = Scheme.for_dtype(options.dtype, options.group_size, options.symmetric, options.full_range)
        return options.dtype, scheme, options.method
    return options.dtype, None, "copy" if options.dtype == tensor.dtype else "cast"


def _stand_in(
    tensor: HeadTensor, dtype: str, scheme: Scheme | None, low_rank: int
) -> Tensor | QuantizedWeight:
    """A meta tensor of what will be stored, so that plan and writer share one rule for shapes."""
    if dtype not in INT_DTYPES:
        return torch.empty(tensor.shape, dtype=STORED_DTYPES[dtype], device="meta")
    outputs, features = tensor.shape
    symmetric = scheme.symmetric if scheme else bool(tensor.symmetric)
    if scheme is None:
        scheme = Scheme(int(dtype[3:]), tensor.group_size or PER_CHANNEL, symmetric)
    groups = scheme.num_groups(features)
    rows = (features + 1) // 2 if scheme.bits == 4 else features
    scale_dtype = STORED_DTYPES[tensor.scale_dtype or "fp16"]
    with torch.device("meta"):
        return QuantizedWeight(
            torch.empty((rows, outputs), dtype=torch.uint8 if scheme.bits == 4 else torch.int8),
            torch.empty((groups, outputs), dtype=scale_dtype),
            features,
            scheme.bits,
            scheme.group_size,
            None if symmetric else torch.empty((groups, outputs), dtype=torch.int8),
            torch.empty(features, dtype=torch.int32) if tensor.act_order else None,
            torch.empty((features, low_rank), dtype=torch.float16) if low_rank else None,
            torch.empty((low_rank, outputs), dtype=torch.float16) if low_rank else None,
        )


def source_files(heads: MedusaHeads) -> list[Path]:
    """Every file the converted tensors come from, in a fixed order."""
    return sorted({tensor.file for tensor in heads} | set(heads.files))
