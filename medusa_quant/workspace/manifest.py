"""`manifest.json`: everything a reader needs to know, so that nothing is guessed from file sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.heads import TensorId
from ..errors import InputError

FORMAT = "medusa-quant"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """One stored tensor part: a raw file (turbomind) or a tensor inside a container file.

    name: file name, or key in the container. file: the file it is in. part: weight, bias, qweight,
    scales, zeros, g_idx. shape: as stored. tensor_shape: of the whole matrix, (out, in). start, stop:
    the features of `split` (output, input, replicated) held here; stop may lie in vocabulary padding.
    dtype: of this part; weight_dtype: of the tensor it belongs to. error: relative (Frobenius) and max.
    """

    name: str
    file: str
    head: int
    layer: int
    role: str
    part: str
    rank: int
    shape: list[int]
    dtype: str
    bytes: int
    sha256: str
    weight_dtype: str
    tensor_shape: list[int]
    group_size: int | None
    split: str
    start: int
    stop: int
    method: str
    error: dict[str, float]

    @property
    def tensor_id(self) -> TensorId:
        return TensorId(self.head, self.layer, self.role)


@dataclass
class Manifest:
    """See docs/formats.md.

    containers: {file: {bytes, sha256}} of files that hold several tensors. extra_files: config files.
    report: what a calibration gate found, if one ran.
    """

    layout: str
    source: dict[str, Any]
    hidden_size: int
    vocab_size: int | None
    padded_vocab_size: int | None
    num_heads: int
    num_layers: int
    tp: int
    lm_head: str
    lm_head_split: str
    weight_type: str
    group_size: int | None
    files: list[FileEntry] = field(default_factory=list)
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra_files: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Parse a manifest. Raises InputError if it is not ours, of a newer version, or damaged."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"unreadable manifest: {error}", file=path) from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise InputError("not a medusa-quant manifest", file=path)
        version = content.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise InputError(
                "unsupported manifest version", file=path, expected=FORMAT_VERSION, found=version
            )
        try:
            entries = [FileEntry(**entry) for entry in content.pop("files")]
            return cls(files=entries, **content)
        except (KeyError, TypeError) as error:
            raise InputError(f"damaged manifest: {error}", file=path) from error

    def owned_files(self) -> set[str]:
        """Every file this conversion wrote, except config.ini, which other tools share."""
        return {entry.file for entry in self.files} | set(self.containers) | set(self.extra_files)


def is_ours(path: Path) -> bool:
    """Whether a `manifest.json` exists here and was written by this tool."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT
