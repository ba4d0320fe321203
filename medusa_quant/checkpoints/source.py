"""Where a checkpoint lies: a file, a folder (single or sharded) or a Hugging Face repo id."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from .store import StoredTensor, read_entries

_REPO_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?$")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
# Files that hold heads under their usual name come before a scan of the folder.
_HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_DOWNLOAD = ["*.json", "*.safetensors", "*.pt", "pytorch_model*.bin"]


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: its tensors by key, and the JSON files beside them (hints only)."""

    path: Path
    files: list[Path]
    entries: dict[str, StoredTensor]
    config: dict[str, Any] = field(default_factory=dict)
    quantize_config: dict[str, Any] = field(default_factory=dict)


def locate(source: str | Path) -> Path:
    """The local path of a source; a repo id (`org/name`, optionally `@revision`) is downloaded first.

    Raises InputError if it is neither there nor to be had.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not _REPO_ID.match(str(source)):
        raise InputError(
            "no such file or folder", file=source, fix="give a local path or a Hugging Face repo id"
        )
    from huggingface_hub import snapshot_download

    repo, _, revision = str(source).partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=_DOWNLOAD))
    except Exception as error:  # the hub's client raises many unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"no such folder, and not downloadable from the Hugging Face hub: {reason}", file=source
        ) from error


def open_source(source: str | Path) -> Source:
    """Find the tensor files of a checkpoint and list their tensors.

    Raises InputError for a missing shard, a stale index, a key held twice, or a folder without tensors.
    """
    path = locate(source)
    folder = path if path.is_dir() else path.parent
    files, index = ([path], None) if path.is_file() else _find_files(path)
    entries: dict[str, StoredTensor] = {}
    for file in files:
        for key, entry in read_entries(file).items():
            if key in entries:
                raise InputError(f"the key is also in {entries[key].file.name}", file=file, key=key)
            entries[key] = entry
    if index is not None:
        _check_index(index, entries)
    config = read_json(folder / "config.json")
    quantize_config = read_json(folder / "quantize_config.json") or config.get("quantization_config") or {}
    return Source(path, files, entries, config, quantize_config)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no such file. Raises InputError if it is something else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"not valid JSON: {error}", file=file) from error
    if not isinstance(content, dict):
        raise InputError("not a JSON object", file=file, found=type(content).__name__)
    return content


def _find_files(folder: Path) -> tuple[list[Path], Path | None]:
    for name in _HEAD_FILES:
        if (folder / name).is_file():
            return [folder / name], None
    indexes = sorted(folder.glob("*.safetensors.index.json")) or sorted(folder.glob("*.bin.index.json"))
    if indexes:
        shards = sorted(set(_weight_map(indexes[0]).values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise InputError(
                    "a shard named by the index is missing",
                    file=indexes[0],
                    expected=shard,
                    fix="download the missing shard",
                )
        return [folder / shard for shard in shards], indexes[0]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        files = sorted(file for file in folder.iterdir() if file.suffix in _TORCH_SUFFIXES)
    if not files:
        raise InputError("no tensor files here", file=folder, expected="*.safetensors, *.pt or *.bin")
    return files, None


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(shard, str) for shard in mapping.values()):
        raise InputError("the index has no weight_map of key to shard", file=index)
    return mapping


def _check_index(index: Path, entries: dict[str, StoredTensor]) -> None:
    mapping = _weight_map(index)
    for key, shard in mapping.items():
        if key not in entries or entries[key].file.name != shard:
            raise InputError(
                "the index is stale: the shard does not hold this key", file=index, key=key, expected=shard
            )
    for key, entry in entries.items():
        if key not in mapping:
            raise InputError(
                f"the index is stale: it does not list this key of {entry.file.name}", file=index, key=key
            )
