"""Every instruction set the host can run gives the same results; and how kernels are built."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import make_weight, oracle, relative

from medusa_quant.errors import InputError
from medusa_quant.kernels.cpu import build as building
from medusa_quant.kernels.cpu.isa import ISA_VARIABLE, available_isas, chosen_isa
from medusa_quant.kernels.dispatch import unavailable

pytestmark = pytest.mark.skipif(unavailable("cpu") is not None, reason=str(unavailable("cpu")))

_RUN = """
import sys, torch
sys.path.insert(0, {folder!r})
from kernel_cases import make_weight
from medusa_quant.kernels import prepare
x = torch.randn(7, 160, generator=torch.Generator().manual_seed(0))
results = {{}}
for kind in ("int4", "int8", "fp32", "fp16", "bf16"):
    for group in ((-1, 32) if kind.startswith("int") else (-1,)):
        for mode in ("exact", "int8"):
            weight = make_weight(kind, 160, 70, group, symmetric=False)
            prepared = prepare(weight, activation=mode, backend="cpu")
            for dtype in (torch.float32, torch.bfloat16):
                results[kind, group, mode, dtype] = prepared.run(x.to(dtype))
torch.save(results, {out!r})
"""


Results = dict[tuple[str, int, str, torch.dtype], torch.Tensor]


def run_with(isa: str, folder: Path) -> Results:
    out = folder / f"{isa}.pt"
    code = _RUN.format(folder=str(Path(__file__).parent), out=str(out))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, ISA_VARIABLE: isa})
    results: Results = torch.load(out)
    return results


def test_every_instruction_set_of_this_host(tmp_path: Path) -> None:
    assert available_isas()[-1] == "portable"
    results = {isa: run_with(isa, tmp_path) for isa in available_isas()}
    x = torch.randn(7, 160, generator=torch.Generator().manual_seed(0))
    for case, portable in results["portable"].items():
        kind, group, mode, dtype = case
        weight = make_weight(kind, 160, 70, group, symmetric=False)
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        for isa, found in results.items():
            result = found[case]
            loose = mode == "int8" and kind.startswith("int")
            assert relative(result, oracle(x.to(dtype), weight)) < (2e-2 if loose else limit), (isa, case)
            assert relative(result, portable.double()) < limit, (isa, case)


def test_an_instruction_set_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(InputError, match="avx1024"):
        chosen_isa()


def test_the_cache_is_private_and_keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path / "cache"))
    first = building.build("portable")
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    changed = first.stat().st_mtime_ns
    assert building.build("portable") == first
    assert first.stat().st_mtime_ns == changed
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setattr(building, "_FLAGS", [*building._FLAGS, "-DOTHER"])
    assert building._key(["c++"], building._FLAGS, None) not in first.name
    first.parent.chmod(0o777)
    with pytest.raises(building.CompileError, match="belong to you"):
        building.cache_folder()


def test_without_a_compiler_torch_takes_over_and_says_so_once(tmp_path: Path) -> None:
    code = (
        "import torch, warnings\n"
        "from medusa_quant.kernels import prepare\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    first, second = prepare(torch.ones(8, 8)), prepare(torch.ones(8, 8))\n"
        "assert first.backend != 'cpu', first.backend\n"
        "assert torch.equal(first.run(torch.ones(1, 8)), torch.full((1, 8), 8.0))\n"
        "texts = [str(w.message) for w in seen if 'CPU kernels unavailable' in str(w.message)]\n"
        "assert len(texts) == 1 and 'no C++ compiler found' in texts[0], texts\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", building.CACHE_VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(building.CompileError, match="false failed"):
        building.build("portable")
    assert list(tmp_path.iterdir()) == []
