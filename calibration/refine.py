"""Better scales for given codes: least squares in the Hessian's norm, jointly over a row's groups."""

from __future__ import annotations

import torch
from torch import Tensor

from .hessian import Hessian


def refine_scales(
    weight: Tensor, codes: Tensor, zeros: Tensor | None, group_width: int, hessian: Hessian
) -> Tensor:
    """fp32 [n, G]: for each row the scales s minimizing d H d^T of d = weight - (codes - zero) * s.

    weight fp32 [n, K]; codes int8 [n, K]; zeros int8 [n, G] or None. Setting the derivative to zero gives
    the G x G system A s = b with A[i, j] = q_i^T H_ij q_j and b[i] = q_i^T H_i: w, where q_i is a row's
    codes inside group i and 0 outside.
    """
    rows, features = weight.shape
    groups = -(-features // group_width)
    values = codes.float()
    if zeros is not None:
        values = values - zeros.float().repeat_interleave(group_width, 1)[:, :features]
    spread = values.new_zeros((rows, groups, features))
    for index in range(groups):
        part = slice(index * group_width, min((index + 1) * group_width, features))
        spread[:, index, part] = values[:, part]
    product = spread @ hessian.matrix
    system = product @ spread.transpose(1, 2)
    target = (product @ weight.unsqueeze(2)).squeeze(2)
    # A group whose codes are all 0 has a free scale.
    idle = system.diagonal(dim1=1, dim2=2) <= 0
    system = system + torch.diag_embed(idle.float())
    return torch.linalg.solve(system.double(), target.double()).float()
