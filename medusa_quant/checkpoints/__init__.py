"""Reading Medusa heads from any checkpoint, lazily and memory-mapped."""

from .heads import HeadTensor, MedusaHeads, TensorId
from .load import load_heads

__all__ = ["HeadTensor", "MedusaHeads", "TensorId", "load_heads"]
