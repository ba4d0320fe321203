"""The container of a GGUF file (versions 2 and 3, little-endian): metadata and where its tensors lie.

gguf's own reader makes an object of every token of the vocabulary, which takes seconds; this skips what
the decoder does not ask for. Layout: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor: shape is (out, in) as in torch; `kind` is ggml's number of its quantization."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """metadata: scalars and strings by key (arrays are left out). tensors by name. data: the mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def load(self, name: str) -> np.ndarray:
        """A tensor dequantized to a new fp32 array of its shape. Raises InputError for an unknown kind."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes = tensor.shape[-1] // block * block_bytes
            rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
            raw = np.frombuffer(self.data, np.uint8, rows * row_bytes, tensor.offset)
            if kind == GGMLQuantizationType.F32:
                return raw.view(np.float32).reshape(tensor.shape).copy()
            if kind == GGMLQuantizationType.F16:
                return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
            return dequantize(raw.reshape(*tensor.shape[:-1], row_bytes), kind).astype(np.float32, copy=False)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise InputError(f"cannot be dequantized: {error}", file=self.path, key=name) from error


def find_gguf(path: Path) -> Path | None:
    """The GGUF file meant by a path: itself, or the only one in a folder that holds no other checkpoint.

    Raises InputError where a folder holds several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise InputError("several .gguf files", file=path, fix=f"name one, such as {files[0].name}")
    return files[0] if files else None


def read_gguf(path: Path) -> GGUFFile:
    """Read a file's header. Raises InputError if it is not GGUF, of another version, or cut off, and where
    the gguf package, which dequantizes, is not installed."""
    if find_spec("gguf") is None:
        raise InputError(
            "reading GGUF needs the gguf package", file=path, fix="pip install 'medusa-quant[gguf]'"
        )
    broken = "not a complete GGUF file"
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(data)
        if data[:4] != b"GGUF":
            raise InputError(broken, file=path, fix="download or copy it again")
        version = header.scalar("<I", 4)
        if version not in (2, 3):
            raise InputError("unsupported GGUF version", file=path, expected="2 or 3", found=version)
        tensor_count, key_count = header.scalar("<Q"), header.scalar("<Q")
        metadata = {}
        for _ in range(key_count):
            key, kind = header.string(), header.scalar("<I")
            value = header.value(kind)
            if value is not None:
                metadata[key] = value
        found = [header.tensor() for _ in range(tensor_count)]
    except (OSError, ValueError, KeyError, struct.error) as error:
        reason = f"unknown value type {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{broken}: {reason}", file=path, fix="download or copy it again") from error
    alignment = metadata.get("general.alignment", 32)
    start = -(-header.position // alignment) * alignment
    tensors = {name: GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}
    last = max((tensor.offset for tensor in tensors.values()), default=0)
    if last > len(data):
        raise InputError(f"{broken}: tensors lie beyond its end", file=path, fix="download or copy it again")
    return GGUFFile(path, metadata, tensors, data)


class _Header:
    """A cursor over the mapped header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, form: str, position: int | None = None) -> Any:
        if position is not None:
            self.position = position
        (value,) = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self._data):
            raise ValueError("a string runs past its end")
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A scalar or string; an array is passed over and gives None."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item in _SCALARS:
            self.position += count * struct.calcsize(_SCALARS[item])
            return None
        skip: Callable[[], Any] = self._skip_string if item == _STRING else lambda: self.value(_ARRAY)
        for _ in range(count):
            skip()
        return None

    def _skip_string(self) -> None:
        (length,) = struct.unpack_from("<Q", self._data, self.position)
        self.position += 8 + length

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
        return name, tuple(reversed(dims)), self.scalar("<I"), self.scalar("<Q")
