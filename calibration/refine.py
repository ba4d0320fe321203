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
    padding = groups * group_width - features
    system, target = values.new_empty((rows, groups, groups)), values.new_empty((rows, groups))
    for index in range(groups):
        part = slice(index * group_width, min((index + 1) * group_width, features))
        product = values[:, part] @ hessian.matrix[part]
        target[:, index] = (product * weight).sum(1)
        product = torch.nn.functional.pad(product.mul_(values), (0, padding))
        system[:, index] = product.view(rows, groups, group_width).sum(2)
    # A group whose codes are all 0 has a free scale.
    idle = system.diagonal(dim1=1, dim2=2) <= 0
    system = system + torch.diag_embed(idle.float())
    return torch.linalg.solve(system.double(), target.double()).float()
