"""Dequant-GEMM kernels: a reference, and backends held to it."""
