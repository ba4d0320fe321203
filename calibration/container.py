"""Tensors with a JSON description in one safetensors file, replaced in one step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import InputError

_METADATA_KEY = "medusa_quant_calibration"


def write_container(path: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    """Write atomically; folders are made. Raises InputError where the place cannot be written."""
    data = save(tensors, {_METADATA_KEY: json.dumps(content, ensure_ascii=False)})
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror}", file=path) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_container(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Inverse of `write_container`. Raises InputError for a missing, damaged or foreign file."""
    if not path.is_file():
        raise InputError("no such calibration file", file=path, fix="run `medusa-quant calibrate` first")
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if _METADATA_KEY not in metadata:
                raise InputError("not calibration statistics", file=path, fix="give the file of --out")
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"not a complete calibration file: {error}", file=path) from error
    return tensors, json.loads(metadata[_METADATA_KEY])
