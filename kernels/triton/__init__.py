"""Dequant-GEMM in Triton for CUDA and ROCm. Importing this package does not import triton; its modules do."""
