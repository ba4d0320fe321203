"""Dequant-GEMM kernels: a reference, backends held to it, and the dispatch that picks among them."""

from .backend import PreparedWeight, Problem
from .dispatch import choose, dequant_gemm, judge, prepare

__all__ = ["PreparedWeight", "Problem", "choose", "dequant_gemm", "judge", "prepare"]
