"""Quantized Medusa heads: convert, calibrate, run and measure them.

The public names below are loaded on first use, so that importing the package stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "load_heads": "checkpoints",
    "MedusaHeads": "checkpoints",
    "convert": "conversion",
    "ConvertOptions": "plan",
    "Workspace": "workspace",
    "verify": "verification",
    "QuantizedWeight": "quantization",
    "Scheme": "quantization",
    "Engine": "runtime.engine",
    "LlamaBatch": "runtime.batch",
    "SamplingParams": "runtime.request",
    "InputError": "errors",
    "MedusaQuantError": "errors",
}
__all__ = [
    "ConvertOptions",
    "Engine",
    "InputError",
    "LlamaBatch",
    "MedusaHeads",
    "MedusaQuantError",
    "QuantizedWeight",
    "SamplingParams",
    "Scheme",
    "Workspace",
    "__version__",
    "convert",
    "load_heads",
    "verify",
]

if TYPE_CHECKING:
    from .checkpoints import MedusaHeads, load_heads
    from .conversion import convert
    from .errors import InputError, MedusaQuantError
    from .plan import ConvertOptions
    from .quantization import QuantizedWeight, Scheme
    from .runtime.batch import LlamaBatch
    from .runtime.engine import Engine
    from .runtime.request import SamplingParams
    from .verification import verify
    from .workspace import Workspace


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
