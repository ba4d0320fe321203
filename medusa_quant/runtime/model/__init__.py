"""The base model: a lean Llama-family decoder over a slot KV cache."""

from ...kernels.tree_rows import TreeRows
from .cache import KVCache, Segment
from .config import ModelConfig
from .llama import LlamaModel
from .loader import load_base, load_tokenizer, open_base

__all__ = [
    "KVCache",
    "LlamaModel",
    "ModelConfig",
    "Segment",
    "TreeRows",
    "load_base",
    "load_tokenizer",
    "open_base",
]
