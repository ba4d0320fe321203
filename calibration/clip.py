"""Clip search on outputs: what a group's rounding error costs, by the inputs it is multiplied with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def group_cost(matrix: Tensor, group_width: int) -> Callable[[Tensor], Tensor]:
    """The squared output error each group causes alone, for `choose_params`: d H_gg d^T.

    matrix: fp32 [K, K], E[x x^T]; a short last group is padded with inputs that cost nothing. This is
    AWQ's clip search (Lin et al. 2023) with the sum over sampled inputs taken once, into H_gg.
    """
    features = matrix.shape[0]
    groups = -(-features // group_width)
    blocks = matrix.new_zeros((groups, group_width, group_width))
    for index in range(groups):
        part = slice(index * group_width, min((index + 1) * group_width, features))
        width = part.stop - part.start
        blocks[index, :width, :width] = matrix[part, part]

    def cost(difference: Tensor) -> Tensor:
        by_group = difference.transpose(0, 1)  # [G, N, g]
        return ((by_group @ blocks) * by_group).sum(-1).t()

    return cost
