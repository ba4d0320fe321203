"""Writing stored parts: raw files, or safetensors containers, hashed while they are written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .layouts import Layout
from .stream import byte_blocks

_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
}


class PartWriter:
    """Writes parts one after another into a folder. Use as a context manager; `finish` writes containers.

    Casting and transposing a block overlaps with hashing and writing the one before it.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self._containers: dict[str, _Container] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="medusa-quant-writer")

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for container in self._containers.values():
            container.close()

    def write(
        self, name: str, file: str, tensor: Tensor, dtype: torch.dtype, clip: bool = False
    ) -> tuple[int, str]:
        """Store one part, cast to `dtype`. Returns (bytes, sha256 of its data)."""
        if self.layout.container is None:
            with open(self.folder / file, "xb") as out:
                size, digest = self._pump(out, tensor, dtype, clip)
                _sync(out)
            return size, digest
        container = self._containers.setdefault(file, _Container(self.folder, file))
        size, digest = self._pump(container.segment(dtype), tensor, dtype, clip)
        container.record(name, dtype, list(tensor.shape), size)
        return size, digest

    def finish(self, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Assemble the containers, with this metadata in their headers: {file: {bytes, sha256}}."""
        return {file: container.assemble(metadata) for file, container in self._containers.items()}

    def write_text(self, name: str, text: str) -> None:
        with open(self.folder / name, "w", encoding="utf-8") as out:
            out.write(text)
            _sync(out)

    def _pump(self, out: IO[bytes], tensor: Tensor, dtype: torch.dtype, clip: bool) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        pending: Future[None] | None = None

        def store(block: memoryview) -> None:
            digest.update(block)
            out.write(block)

        for block in byte_blocks(tensor, dtype, clip):
            if pending is not None:
                pending.result()
            pending = self._pool.submit(store, block)
            size += block.nbytes
        if pending is not None:
            pending.result()
        return size, digest.hexdigest()


class _Container:
    """A safetensors file being written, one segment a dtype width.

    Readers map tensors in place, so each must lie at a multiple of its item size: wide items go first.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._path = folder / file
        self._segments: dict[int, IO[bytes]] = {}
        self._tensors: dict[int, list[tuple[str, str, list[int], int]]] = {}

    def segment(self, dtype: torch.dtype) -> IO[bytes]:
        width = dtype.itemsize
        if width not in self._segments:
            # Removed when the container is assembled, or with the whole staging folder on failure.
            self._segments[width] = open(f"{self._path}.{width}", "x+b")  # noqa: SIM115
            self._tensors[width] = []
        return self._segments[width]

    def record(self, name: str, dtype: torch.dtype, shape: list[int], size: int) -> None:
        self._tensors[dtype.itemsize].append((name, _SAFETENSORS_NAMES[dtype], shape, size))

    def assemble(self, metadata: dict[str, str]) -> dict[str, Any]:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        offset = 0
        widths = sorted(self._segments, reverse=True)
        for width in widths:
            for name, dtype, shape, size in self._tensors[width]:
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
                offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256()
        with open(self._path, "xb") as out:
            for block in self._blocks(len(text).to_bytes(8, "little") + text, widths):
                digest.update(block)
                out.write(block)
            size = out.tell()
            _sync(out)
        for width in widths:
            os.unlink(f"{self._path}.{width}")
        return {"bytes": size, "sha256": digest.hexdigest()}

    def _blocks(self, head: bytes, widths: list[int]) -> Iterator[bytes]:
        yield head
        for width in widths:
            segment = self._segments[width]
            segment.seek(0)
            while block := segment.read(8 << 20):
                yield block

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()


def _sync(out: IO[Any]) -> None:
    out.flush()
    os.fsync(out.fileno())
