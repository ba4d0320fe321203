"""`results.json`: what has been measured so far, from which a broken-off comparison goes on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from .settings import Settings

FORMAT_VERSION = 1
_PACKAGES = ("medusa-quant", "torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True)
class Run:
    """One row run once. seconds: wall time of all prompts. parts: of it, by part of a step."""

    variant: str
    tree: str
    batch: int
    repeat: int
    tokens: int
    seconds: float
    steps: int
    parts: dict[str, float]
    acceptance_length: float
    acceptance_per_position: list[float]
    nodes_per_draft: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class VariantResult:
    """bytes: what a step reads of the heads. quality: an evaluation against the fp16 heads, or None."""

    folder: str
    bytes: int
    load_seconds: float
    peak_memory_bytes: int | None
    quality: dict[str, Any] | None


@dataclass
class PeerRun:
    """Another program, the same prompts. error: why it could not be measured."""

    peer: str
    batch: int
    repeat: int
    version: str
    tokens: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass
class Results:
    """All of `results.json`. complete: [repeat, batch] groups whose rows were measured side by side."""

    settings: dict[str, Any]
    fingerprint: str
    machine: dict[str, Any]
    versions: dict[str, str]
    variants: dict[str, VariantResult] = field(default_factory=dict)
    plain_peak_memory_bytes: int | None = None
    runs: list[Run] = field(default_factory=list)
    peers: list[PeerRun] = field(default_factory=list)
    complete: list[tuple[int, int]] = field(default_factory=list)
    reference: list[list[int]] | None = None

    @classmethod
    def begin(cls, settings: Settings) -> Results:
        return cls(settings.as_dict(), settings.fingerprint, machine(), versions())

    @classmethod
    def load(cls, file: Path, settings: Settings) -> Results:
        """Continue an earlier run. Raises InputError where it had other settings."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.pop("format_version") != FORMAT_VERSION:
                raise InputError("results of another version", file=file, fix="pass --force to start anew")
            content.pop("rows", None)
            content["variants"] = {name: VariantResult(**v) for name, v in content["variants"].items()}
            content["runs"] = [Run(**run) for run in content["runs"]]
            content["peers"] = [PeerRun(**run) for run in content["peers"]]
            content["complete"] = [(repeat, batch) for repeat, batch in content["complete"]]
            results = cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"not the results of a comparison: {error}", file=file, fix="pass --force to start anew"
            ) from error
        if results.fingerprint != settings.fingerprint:
            raise InputError(
                "the folder holds a comparison with other settings",
                file=file,
                fix="choose another --out, or pass --force to start anew",
            )
        # Rows of a group that was cut off were not measured beside one another.
        results.runs = [run for run in results.runs if (run.repeat, run.batch) in results.complete]
        return results

    def save(self, file: Path, rows: Sequence[dict[str, Any]]) -> None:
        """rows: the summary, for people who read the file; recomputed on load."""
        content = {"format_version": FORMAT_VERSION, "rows": list(rows), **asdict(self)}
        temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(temporary, file)
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", file=file) from error
        finally:
            temporary.unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
