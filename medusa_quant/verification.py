"""Checking a converted folder: against its manifest, and against the checkpoint it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoints import HeadTensor, MedusaHeads, load_heads
from .checkpoints.base import base_lm_head, check_fits, with_own_lm_heads
from .checkpoints.store import read_entries
from .errors import InputError
from .quantization import WeightError
from .workspace.layouts import LAYOUTS
from .workspace.manifest import FileEntry, Manifest
from .workspace.naming import MANIFEST, is_head_file
from .workspace.reader import Workspace
from .workspace.stream import map_file

# How far an error measured again may exceed the recorded one: other summation orders, nothing more.
_ERROR_SLACK = 1.02
_ERROR_FLOOR = 1e-6


@dataclass(frozen=True)
class VerifyReport:
    """failures: one line each, empty if all is well. tensors: per-tensor error against a source."""

    folder: Path
    files: int
    bytes: int
    failures: list[str] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures


def verify(
    path: str | Path,
    against: str | Path | None = None,
    base: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> VerifyReport:
    """Check sizes, checksums, missing and extra files, NaN; with `against`, every tensor's error too.

    against: a checkpoint in any readable form. base: the model whose LM matrix the heads were given
    (default: the one the manifest names). An error counts as a failure where it exceeds the recorded one.
    Raises InputError if the folder or the source cannot be read at all.
    """
    workspace = Workspace.open(path)
    manifest, folder = workspace.manifest, workspace.folder
    failures = _check_files(folder, manifest, progress)
    tensors: list[dict[str, Any]] = []
    if against is not None and not failures:
        tensors = _compare(workspace, against, base, failures)
    return VerifyReport(folder, len(manifest.files), sum(e.bytes for e in manifest.files), failures, tensors)


def verify_rank(workspace: Workspace, rank: int) -> list[str]:
    """The failures among one rank's own files, as `verify` words them; no other rank's file is read."""
    return _check_parts(workspace.folder, workspace.manifest, rank, None)


def _check_files(
    folder: Path, manifest: Manifest, progress: Callable[[int, int, str], None] | None
) -> list[str]:
    failures = _check_parts(folder, manifest, None, progress)
    for name, expected in manifest.containers.items():
        failures += _check_container(folder, name, expected, manifest)
    for name in manifest.extra_files:
        if not (folder / name).is_file():
            failures.append(f"{folder / name}: missing file")
    known = manifest.owned_files() | {MANIFEST}
    failures += [
        f"{file}: extra file, not in the manifest"
        for file in sorted(folder.iterdir())
        if file.name not in known and is_head_file(file.name)
    ]
    return failures


def _check_parts(
    folder: Path, manifest: Manifest, rank: int | None, progress: Callable[[int, int, str], None] | None
) -> list[str]:
    failures = []
    raw = LAYOUTS[manifest.layout].container is None
    entries = [entry for entry in manifest.files if rank in (None, entry.rank)]
    total, done = sum(entry.bytes for entry in entries), 0
    for entry in entries:
        if progress is not None:
            progress(done, total, entry.name)
        done += entry.bytes
        if Path(entry.file).name != entry.file:
            failures.append(f"{entry.file}: the manifest names a path, expected a file name")
            continue
        try:
            tensor = _read_part(folder, entry, raw)
        except InputError as error:
            failures.append(str(error))
            continue
        if _sha256(tensor) != entry.sha256:
            failures.append(
                f"{folder / entry.file}: {entry.name}: checksum differs from the manifest's; convert again"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            allowed = bool(manifest.options.get("allow_nonfinite")) and entry.part in ("weight", "bias")
            if not allowed:
                failures.append(f"{folder / entry.file}: {entry.name}: holds NaN or Inf")
    return failures


def _read_part(folder: Path, entry: FileEntry, raw: bool) -> Tensor:
    if raw:
        return map_file(folder / entry.file, entry.dtype, entry.shape)
    stored = read_entries(folder / entry.file).get(entry.name)
    if stored is None:
        raise InputError("no such tensor", file=folder / entry.file, key=entry.name)
    return stored.load()


def _check_container(folder: Path, name: str, expected: dict[str, Any], manifest: Manifest) -> list[str]:
    path = folder / name
    if not path.is_file():
        return []  # already reported with its tensors
    failures = []
    if path.stat().st_size != expected["bytes"]:
        failures.append(f"{path}: wrong size (expected {expected['bytes']}, found {path.stat().st_size})")
    elif _file_sha256(path) != expected["sha256"]:
        failures.append(f"{path}: checksum differs from the manifest's")
    try:
        extra = set(read_entries(path)) - {entry.name for entry in manifest.files if entry.file == name}
    except InputError as error:
        return [*failures, str(error)]
    return failures + [f"{path}: extra tensor {key}, not in the manifest" for key in sorted(extra)]


def _compare(
    workspace: Workspace, against: str | Path, base: str | None, failures: list[str]
) -> list[dict[str, Any]]:
    source = load_heads(against)
    manifest = workspace.manifest
    converted = load_heads(workspace.folder)
    base = base or manifest.options.get("base")
    if source.shared_lm_head and not converted.shared_lm_head:
        if base is None:
            raise InputError(
                "the source shares its LM matrix with a base", file=against, fix="pass --base MODEL"
            )
        lm_head = base_lm_head(base)
        check_fits(source, lm_head)
        source = with_own_lm_heads(source, lm_head)
    failures += _differing_structure(converted, source)
    if failures:
        return []
    recorded = {entry.tensor_id: entry for entry in manifest.files}
    rows = []
    for tensor_id, tensor in converted.tensors.items():
        error = _error(source.tensors[tensor_id], tensor)
        limit = recorded[tensor_id].error["relative"] * _ERROR_SLACK + _ERROR_FLOOR
        ok = error.relative <= limit
        rows.append({"tensor": str(tensor_id), "dtype": tensor.dtype, **error.as_dict(), "ok": ok})
        if not ok:
            failures.append(
                f"{tensor_id}: relative error {error.relative:.3g} against {against}, "
                f"the manifest records {recorded[tensor_id].error['relative']:.3g}"
            )
    return rows


def _differing_structure(converted: MedusaHeads, source: MedusaHeads) -> list[str]:
    failures = []
    for tensor_id, tensor in converted.tensors.items():
        other = source.tensors.get(tensor_id)
        if other is None:
            failures.append(f"{tensor_id}: not in the source {source.path}")
        elif other.shape != tensor.shape:
            failures.append(f"{tensor_id}: shape {list(tensor.shape)}, the source has {list(other.shape)}")
    optional = "lm_head.weight" if converted.shared_lm_head else None
    failures += [
        f"{tensor_id}: in the source, but not here"
        for tensor_id in source.tensors
        if tensor_id not in converted.tensors and tensor_id.role != optional
    ]
    return failures


def _error(source: HeadTensor, stored: HeadTensor) -> WeightError:
    error = WeightError()
    first, second = source.dense(), stored.dense()
    if first.ndim == 1:
        first, second = first.unsqueeze(0), second.unsqueeze(0)
    step = max(1, (1 << 21) // max(1, first.shape[1]))
    for start in range(0, first.shape[0], step):
        wanted, found = first[start : start + step], second[start : start + step]
        if not bool(torch.isfinite(wanted).all()):
            # NaN and Inf that were allowed through are right where both sides have them.
            same = (wanted == found) | (wanted.isnan() & found.isnan())
            wanted, found = wanted.masked_fill(same, 0), found.masked_fill(same, 0)
        error.add(wanted, found)
    return error


def _sha256(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    flat = tensor.reshape(-1).view(torch.uint8)
    for block in flat.split(8 << 20):
        digest.update(block.numpy().data)
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()
