"""Integer weights: schemes, choosing parameters, codes, packing. Pure functions on tensors, no files."""

from .error import WeightError
from .packing import pack_int4, unpack_int4
from .params import choose_params
from .quantize import NonFiniteError, quantize_weight
from .scheme import PER_CHANNEL, Scheme, parse_dtype
from .weight import QuantizedWeight

__all__ = [
    "PER_CHANNEL",
    "NonFiniteError",
    "QuantizedWeight",
    "Scheme",
    "WeightError",
    "choose_params",
    "pack_int4",
    "parse_dtype",
    "quantize_weight",
    "unpack_int4",
]
