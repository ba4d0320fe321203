"""Lazy tensor files: what is in them without reading it, and one tensor at a time, memory-mapped."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import InputError

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not yet read. alias: equal for tensors that share storage (.pt only)."""

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    alias: object = None

    def load(self) -> Tensor:
        """A view of the mapped file; it stays mapped only while the tensor (or a view of it) lives."""
        if self.file.suffix == ".safetensors":
            with _open_safetensors(self.file) as handle:
                return handle.get_tensor(self.key)
        return _load_pickle(self.file)[self.key]


def read_entries(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one `.safetensors` or torch file, by key, without reading their data.

    Raises InputError for an empty, truncated or foreign file, and for a pickle that needs code to load.
    """
    if not file.is_file():
        raise InputError("no such file", file=file)
    if file.stat().st_size == 0:
        raise InputError("the file is empty", file=file, fix="download or copy it again")
    if file.suffix == ".safetensors":
        return _safetensors_entries(file)
    return _pickle_entries(file)


def _open_safetensors(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"not a complete safetensors file: {error}", file=file, fix="download or copy it again"
        ) from error


def _safetensors_entries(file: Path) -> dict[str, StoredTensor]:
    entries = {}
    with _open_safetensors(file) as handle:
        for key in handle.keys():  # noqa: SIM118 - not a dict
            view = handle.get_slice(key)
            name = view.get_dtype()
            if name not in _SAFETENSORS_DTYPES:
                raise InputError("unsupported tensor dtype", file=file, key=key, found=name)
            entries[key] = StoredTensor(key, file, _SAFETENSORS_DTYPES[name], tuple(view.get_shape()))
    return entries


def _pickle_entries(file: Path) -> dict[str, StoredTensor]:
    entries = {}
    for key, tensor in _load_pickle(file).items():
        alias = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
        entries[key] = StoredTensor(key, file, tensor.dtype, tuple(tensor.shape), alias)
    return entries


def _load_pickle(file: Path) -> dict[str, Tensor]:
    try:
        content = _torch_load(file)
    except pickle.UnpicklingError as error:
        raise InputError(
            "the pickle needs code to load, which is never run here",
            file=file,
            fix="save a plain state dict of tensors, best as safetensors",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"not a complete torch file: {reason}", file=file, fix="download or copy it again"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise InputError("not a state dict", file=file, found=type(content).__name__)
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise InputError("not a tensor", file=file, key=str(key), found=type(value).__name__)
    return {str(key): value.detach() for key, value in content.items()}


def _torch_load(file: Path) -> object:
    with warnings.catch_warnings():
        # Whether its unpickler may fail on another protocol is told by whether it does.
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files in torch's format from before 1.6 cannot be mapped.
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)
