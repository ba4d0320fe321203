"""Compiling the shipped kernels for a target without a device, and reading what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .config import BUCKETS, FP32, MAX_TOP_K, SHARED_LIMIT, TABLE
from .launch import SUM_TILE, group_constants, kernel_of, merge_warps
from .second_stage import merge_top, sum_parts

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_MATRIX = {"cuda": r"\b(?:HMMA|HGMMA|UTCHMMA)\b", "hip": r"\bv_mfma_"}
_SPILL = {"cuda": r"\b(?:STL|LDL)\b", "hip": r"\bscratch_(?:load|store)_"}
_INT_TO_FLOAT = {"cuda": r"\bI2FP?\b", "hip": r"\bv_cvt_(?:pk_)?f(?:16|32|64)_(?:[iu]|ubyte)"}


@dataclass(frozen=True)
class Variant:
    """One GEMM as shipped: a weight's form, x's dtype, the epilogue, and the bucket of M."""

    arch: str
    kind: str
    dtype: str  # "fp16", "bf16" or "fp32"
    bucket: int
    group_size: int = 128
    zeros: bool = False
    resblock: bool = False  # with bias, SiLU and residual
    split_k: int = 1
    top_k: int = 0


@dataclass(frozen=True)
class Report:
    """What the compiler made of a kernel: shared memory in bytes, registers, counts of instructions."""

    shared: int
    registers: int
    spills: int
    matrix: int
    int_to_float: int

    def problems(self, arch: str, variant: Variant | None = None) -> list[str]:
        """The rules broken, of every kernel or of a GEMM variant as well.

        A GEMM must use matrix units (fp32 has none), and an int4 one convert no integer to a float.
        """
        found = []
        if self.spills:
            found.append(f"{self.spills} spill instructions")
        if self.shared > SHARED_LIMIT[arch]:
            found.append(f"{self.shared} bytes of shared memory, over {SHARED_LIMIT[arch]}")
        if variant is not None and variant.dtype != "fp32" and not self.matrix:
            found.append("no matrix instruction")
        if variant is not None and variant.kind == "int4" and self.int_to_float:
            found.append(f"{self.int_to_float} int-to-float conversions")
        return found


def shipped_variants(arch: str) -> Iterator[Variant]:
    """Every bucket's configuration, and at the smallest bucket every form of weight and epilogue."""
    for bucket in BUCKETS:
        yield Variant(arch, "int4", "fp16", bucket)
        yield Variant(arch, "int8", "bf16", bucket, group_size=-1)
    small = BUCKETS[0]
    yield Variant(arch, "int4", "bf16", small, group_size=32, zeros=True, resblock=True)
    yield Variant(arch, "int4", "fp16", small, group_size=64, split_k=4)
    yield Variant(arch, "int4", "bf16", small, top_k=10)
    yield Variant(arch, "int8", "fp16", small, zeros=True, resblock=True)
    yield Variant(arch, "int4", "fp32", small, group_size=32, zeros=True, resblock=True)
    yield Variant(arch, "int8", "fp32", small, group_size=-1, top_k=10)
    yield Variant(arch, "nf4", "bf16", small, group_size=64, top_k=10)


def compile_variant(variant: Variant) -> Report:
    """Compile a GEMM for the variant's target; raises what the compiler raises."""
    config = FP32 if variant.dtype == "fp32" else TABLE[variant.arch][variant.bucket]
    x = f"*{variant.dtype}"
    pointers = {
        "x": x,
        "qweight": "*i8" if variant.kind == "int8" else "*i32",
        "scales": "*fp16",
        "zeros": "*i8" if variant.zeros else None,
        "table": "*fp32" if variant.kind == "nf4" else None,
        "bias": x if variant.resblock else None,
        "residual": x if variant.resblock else None,
        "out": "*fp32" if variant.split_k > 1 or variant.top_k else x,
        "indices": "*i32" if variant.top_k else None,
    }
    constants = {
        "stride_xk": 1,
        "SILU": variant.resblock,
        "TOP_K": variant.top_k,
        "SPLIT_K": variant.split_k,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        **group_constants(variant.group_size, _DTYPES[variant.dtype]),
    }
    kernel = kernel_of(variant.kind)
    return _compile(kernel, pointers, constants, variant.arch, config.num_warps, config.num_stages)


def compile_second_stages(arch: str) -> dict[str, Report]:
    """Compile the split-K sum (with a ResBlock's epilogue) and the largest top-k merge."""
    tile_m, tile_n = SUM_TILE
    parts = {"parts": "*fp32", "bias": "*fp16", "residual": "*fp16", "out": "*fp16"}
    candidates = {"values": "*fp32", "indices": "*i32", "top_values": "*fp32", "top_indices": "*i64"}
    block = 8192
    return {
        "sum_parts": _compile(
            sum_parts, parts, {"SILU": True, "SPLIT_K": 8, "BLOCK_M": tile_m, "BLOCK_N": tile_n}, arch, 4, 3
        ),
        "merge_top": _compile(
            merge_top, candidates, {"TOP_K": MAX_TOP_K, "BLOCK": block}, arch, merge_warps(block), 3
        ),
    }


def _compile(
    kernel: Any,
    pointers: Mapping[str, str | None],
    constants: Mapping[str, Any],
    arch: str,
    num_warps: int,
    num_stages: int,
) -> Report:
    constants = {name: None for name, kind in pointers.items() if kind is None} | dict(constants)
    signature = {
        name: "constexpr" if name in constants else pointers.get(name) or "i32" for name in kernel.arg_names
    }
    # What specialization finds at run time: aligned pointers, and dimensions and strides of real models.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and name not in ("M", "GROUPS", "width")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    target = TARGETS[arch]
    binary: Any = triton_compile(source, target=target, options=options)
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        registers = max(int(count) for count in re.findall(r"\.vgpr_count:\s+(\d+)", text))
    else:
        text = _disassemble(binary.asm["cubin"])
        registers = 1 + max(int(number) for number in re.findall(r"\bR(\d+)\b", text))
    counts = (len(re.findall(rule[target.backend], text)) for rule in (_SPILL, _MATRIX, _INT_TO_FLOAT))
    return Report(binary.metadata.shared, registers, *counts)


def _disassemble(cubin: bytes) -> str:
    # Not triton.tools.disasm: it lets the tool's warnings through to the terminal.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
