"""Dequant-GEMM kernels: a reference, and backends held to it."""

from .reference import dequant_gemm

__all__ = ["dequant_gemm"]
