"""Low-rank correction of a quantized matrix: the part of its error that costs most, in two small factors."""

from __future__ import annotations

import torch
from torch import Tensor

from .hessian import Hessian


def low_rank_factors(error: Tensor, hessian: Hessian, rank: int) -> tuple[Tensor, Tensor]:
    """fp16 (a [K, R], b [R, N]) so that (a b)^T is the rank-R matrix closest to `error` in output error.

    error: fp32 [N, K], source - quantized. With H = L L^T, output error is the Frobenius norm of error L;
    its best rank-R approximation (Eckart and Young 1936) is (error L) V V^T with V the leading
    eigenvectors of (error L)^T (error L), so b^T = error L V and a^T = V^T L^-1.
    """
    lower = torch.linalg.cholesky(hessian.matrix.double())
    gram = torch.zeros_like(lower)
    for block in error.split(4096):
        whitened = block.double() @ lower
        gram += whitened.t() @ whitened
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)
    a = torch.linalg.solve_triangular(lower.t(), vectors, upper=True)
    b = (error @ (lower @ vectors).float()).t().double()
    # Even out the factors' sizes: fp16 has few exponents.
    balance = (b.norm(dim=1) / a.norm(dim=0).clamp(min=1e-30)).clamp(min=1e-30).sqrt()
    return (a * balance).half().contiguous(), (b / balance.unsqueeze(1)).half().contiguous()
