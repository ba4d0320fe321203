"""Each shipped configuration compiled for each target without a device, and held to the kernels' rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
if getattr(triton, "knobs", None) is not None and triton.knobs.runtime.interpret:
    pytest.skip("the interpreter cannot compile", allow_module_level=True)

from medusa_quant.kernels.triton import compiled  # noqa: E402
from medusa_quant.kernels.triton.compiled import (  # noqa: E402
    TARGETS,
    Report,
    Variant,
    compile_second_stages,
    compile_variant,
    shipped_variants,
)
from medusa_quant.kernels.triton.config import SHARED_LIMIT, Config  # noqa: E402


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("arch", list(TARGETS))
def test_shipped_kernels_keep_the_rules(arch: str) -> None:
    broken: dict[object, list[str]] = {}
    for variant in shipped_variants(arch):
        problems = compile_variant(variant).problems(arch, variant)
        if problems:
            broken[variant] = problems
    for name, report in compile_second_stages(arch).items():
        if problems := report.problems(arch):
            broken[name] = problems
    assert not broken


def test_int4_stays_small() -> None:
    report = compile_variant(Variant("sm_90", "int4", "fp16", 16))
    assert report.shared <= 32 << 10
    assert report.registers <= 96


def test_the_conversion_counter_sees_a_conversion() -> None:
    # bf16 cannot hold 128 + code in its mantissa, so sm_80 converts int8 codes by instruction.
    assert compile_variant(Variant("sm_80", "int8", "bf16", 16, group_size=-1)).int_to_float > 0


def test_the_spill_counter_sees_a_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FP32", Config(64, 128, 8, 3))
    report = compile_variant(Variant("sm_90", "int8", "fp32", 16, group_size=-1))
    assert report.spills > 0


def test_each_rule_can_fail() -> None:
    variant = Variant("gfx942", "int4", "fp16", 16)
    good = Report(shared=1024, registers=64, spills=0, matrix=8, int_to_float=0)
    assert good.problems("gfx942", variant) == []
    for bad in (
        replace(good, spills=1),
        replace(good, matrix=0),
        replace(good, shared=SHARED_LIMIT["gfx942"] + 1),
        replace(good, int_to_float=1),
    ):
        assert len(bad.problems("gfx942", variant)) == 1
