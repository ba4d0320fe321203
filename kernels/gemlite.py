"""GemLite's linear layer over our integer weights, to be timed beside ours on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ..quantization import QuantizedWeight


def takes(weight: QuantizedWeight, device: torch.device) -> bool:
    """Whether GemLite is installed and has kernels for such a weight: whole groups of 32s, no act-order."""
    width = weight.scheme.group_width(weight.in_features)
    whole = width % 32 == 0 and weight.in_features % width == 0 and weight.g_idx is None
    return device.type == "cuda" and whole and find_spec("gemlite") is not None


class GemliteWeight:
    """gemlite.helper.A16Wn. Codes uint8 [N, K]; scales and zeros [N * groups, 1] in the activations' dtype.

    run: x [M, K] -> [M, N].
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> None:
        from gemlite.helper import A16Wn

        offset = 1 << (weight.bits - 1)
        codes = (weight.codes().t().short() + offset).to(torch.uint8).contiguous()
        zeros = torch.zeros_like(weight.scales).short() if weight.zeros is None else weight.zeros.short()
        scales, points = (part.t().reshape(-1, 1).to(dtype) for part in (weight.scales, zeros + offset))
        width = weight.scheme.group_width(weight.in_features)
        maker = A16Wn(device=str(device))
        self.run = maker.from_weights(codes, scales, points, weight.bits, width, None)
        self.nbytes = weight.nbytes
