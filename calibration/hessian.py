"""The Hessian of a layer's output error, prepared for GPTQ: damping, dead inputs, order, Cholesky factor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError

# Tried in turn: the first fraction of the mean diagonal that makes the matrix positive definite. GPTQ's
# usual 0.01 fits the calibration set too closely: on SmolLM2's held-out states 0.1 gave 2-4 % less error.
DAMPING_LADDER = (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Hessian:
    """matrix: fp32 [K, K], E[x x^T], damped, dead inputs' diagonal set to the damping alone.
    order: int64 [K], input features by falling second moment (act-order).
    factor: fp32 [K, K], upper triangular U with U^T U = inverse of the matrix in that order.
    damping: the fraction of the mean diagonal that was added. dead: inputs that are always 0.
    """

    matrix: Tensor
    order: Tensor
    factor: Tensor
    damping: float
    dead: int

    @property
    def in_features(self) -> int:
        return int(self.matrix.shape[0])

    def quadratic_error(self, difference: Tensor) -> Tensor:
        """fp32 [n]: d H d^T for each row of fp32 [n, K] (the expected squared output error)."""
        return ((difference @ self.matrix) * difference).sum(1)


def prepare_hessian(second_moment: Tensor, what: str = "calibration") -> Hessian:
    """Damp and factor E[x x^T] (fp64 or fp32 [K, K]) as GPTQ needs it (Frantar et al. 2022, section 3.3).

    Inputs that are always zero are kept: with no correlation to others they are rounded to nearest.
    Raises InputError naming `what` for NaN or Inf, or a matrix no damping makes positive definite.
    """
    matrix = second_moment.double()
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(f"{what}: the Hessian holds NaN or Inf", fix="calibrate again")
    diagonal = matrix.diagonal()
    if bool((diagonal < 0).any()):
        raise InputError(f"{what}: the Hessian has a negative diagonal", fix="calibrate again")
    dead = int((diagonal == 0).sum())
    mean = float(diagonal.mean())
    # All inputs dead: every direction costs the same, which is plain rounding.
    scale = mean if mean > 0 else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    for damping in DAMPING_LADDER:
        damped = matrix + damping * scale * torch.eye(len(matrix), dtype=torch.float64)
        factor = _inverse_factor(damped[order][:, order])
        if factor is not None:
            return Hessian(damped.float(), order, factor.float(), damping, dead)
    raise InputError(
        f"{what}: the Hessian is not positive semi-definite",
        expected=f"damping of at most {DAMPING_LADDER[-1]:g} of its mean diagonal to be enough",
        fix="calibrate on more tokens",
    )


def _inverse_factor(matrix: Tensor) -> Tensor | None:
    """Upper U with U^T U = inverse(matrix), or None where the matrix is not positive definite."""
    # With the features reversed, the Cholesky factor L of the matrix gives the inverse's upper factor
    # directly: inverse = (J L^-T J)(J L^-1 J), and one triangular solve replaces an inversion.
    reversed_matrix = matrix.flip(0, 1)
    lower, info = torch.linalg.cholesky_ex(reversed_matrix)
    if int(info) or not bool(torch.isfinite(lower).all()):
        return None
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    factor = inverse.flip(0, 1)
    return factor if bool(torch.isfinite(factor).all()) else None
