"""Compiles the C++ kernels on first use into a private cache folder."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from .isa import ISAS, cpu_flags, machine

SOURCE_FOLDER = Path(__file__).parent.parent / "csrc"
CACHE_VARIABLE = "MEDUSA_QUANT_CACHE"
# GCC's second scheduling pass spills accumulators to hide latencies the CPU hides itself; clang has none.
_FLAGS = [
    "-fno-schedule-insns2",
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-w",
]


class CompileError(RuntimeError):
    """There is no C++ compiler, or it failed; the message is one line."""


def cache_folder() -> Path:
    """MEDUSA_QUANT_CACHE, or medusa-quant in the user's cache folder; created readable by the user only."""
    named = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(named) if named else Path(base) / "medusa-quant"
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        # Loading a library that another user could have written would run their code.
        raise CompileError(f"cache folder {folder} must belong to you and be writable by you only")
    return folder


def find_compiler() -> list[str]:
    """The C++ compiler command: CXX, or the first of c++, g++, clang++ on the PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CompileError(f"no C++ compiler found ({' '.join(named) or 'c++, g++, clang++'})")


def loaded_openmp() -> Path | None:
    """The OpenMP runtime torch has loaded: ours must be the same one, or each would start its own threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(("libgomp", "libiomp5", "libomp")) and path.exists():
            return path
    return None


def build(isa: str) -> Path:
    """Path of the shared library for an instruction set, compiled unless the cache holds it.

    Raises CompileError.
    """
    compiler = find_compiler()
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    openmp = loaded_openmp()
    flags = [*_FLAGS, *ISAS[isa][0], *(["-fopenmp"] if openmp else [])]
    target = cache_folder() / f"medusa_quant_{isa}_{_key(compiler, flags, openmp)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        jobs = []
        for source in sources:
            command = [*compiler, *flags, "-c", str(source), "-o", f"{folder}/{source.stem}.o"]
            jobs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for job in jobs:
            errors = job.communicate()[1]
            if job.returncode:
                raise CompileError(_first_error(errors, compiler))
        library = f"{folder}/library.so"
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        # Named by path: the loader then finds it already loaded under its soname.
        link = [*compiler, "-shared", *objects, "-o", library, *([str(openmp)] if openmp else [])]
        done = subprocess.run(link, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise CompileError(_first_error(done.stderr, compiler))
        # Another process may have built the same file meanwhile: replacing it is harmless.
        os.replace(library, target)
    return target


def _key(compiler: list[str], flags: list[str], openmp: Path | None) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for source in sorted(SOURCE_FOLDER.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    parts = [*compiler, version, *flags, str(openmp), machine(), *sorted(cpu_flags())]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:16]


def _first_error(errors: str, compiler: list[str]) -> str:
    lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["no message"]
    return f"{compiler[0]} failed: {lines[0].strip()}"
