"""Which instruction sets this CPU has, and the one to compile for."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from ...errors import InputError

ISA_VARIABLE = "MEDUSA_QUANT_ISA"
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c", "-mavx2"]
_AVX512_CPU = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c", "avx2"})
# Best first: name -> (compiler flags, CPU flags that must all be present, as /proc/cpuinfo spells them).
ISAS: dict[str, tuple[list[str], frozenset[str]]] = {
    "avx512_bf16": ([*_AVX512, "-mavx512bf16"], _AVX512_CPU | {"avx512_bf16"}),
    "avx512": (_AVX512, _AVX512_CPU),
    "avx2": (["-mavx2", "-mfma", "-mf16c"], frozenset({"avx2", "fma", "f16c"})),
    "portable": ([], frozenset()),
}


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def available_isas() -> list[str]:
    """Instruction sets this machine can run, best first; "portable" is always the last."""
    return [name for name, (_, needed) in ISAS.items() if needed <= cpu_flags()]


def chosen_isa() -> str:
    """The best instruction set, or the one MEDUSA_QUANT_ISA names; InputError if this machine lacks it."""
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return available_isas()[0]
    if forced not in available_isas():
        raise InputError(
            f"{ISA_VARIABLE}: not an instruction set of this machine",
            expected=" | ".join(available_isas()),
            found=forced,
        )
    return forced


def machine() -> str:
    """A short name of the CPU's architecture, part of the cache key."""
    return platform.machine() or "unknown"
