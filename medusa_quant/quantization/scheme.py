"""What a weight is quantized to: the target dtype and, for integers, how codes map to values."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError

FLOAT_DTYPES = ("fp32", "fp16", "bf16")
INT_DTYPES = ("int8", "int4")
WEIGHT_DTYPES = FLOAT_DTYPES + INT_DTYPES
GROUP_SIZES = (32, 64, 128)
PER_CHANNEL = -1


def parse_dtype(name: str) -> str:
    """Normalise a dtype name a user typed (`INT8`, `float16`); raises InputError for an unknown one."""
    aliases = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
    key = name.strip().lower()
    key = aliases.get(key, key)
    if key not in WEIGHT_DTYPES:
        raise InputError("unknown dtype", expected=" | ".join(WEIGHT_DTYPES), found=name)
    return key


@dataclass(frozen=True)
class Scheme:
    """How a [N, K] matrix becomes integer codes q with `w = (q - zero) * scale`.

    bits: 4 or 8. Codes are signed: [-8, 7] or [-128, 127].
    group_size: input features sharing a scale; -1 for one scale per output channel.
    symmetric: no zero point. Codes then stay in [-7, 7] / [-127, 127] unless `full_range`, where the
        value of largest magnitude is mapped to the lowest code exactly (its scale may be negative).
    """

    bits: int
    group_size: int = PER_CHANNEL
    symmetric: bool = True
    full_range: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InputError("unsupported bit width", expected="4 or 8", found=self.bits)
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise InputError("bad group size", expected="at least 1, or -1", found=self.group_size)
        if self.full_range and not self.symmetric:
            raise InputError("--full-range is a variant of symmetric quantization", fix="drop --asymmetric")

    @classmethod
    def for_dtype(
        cls, dtype: str, group_size: int | None = None, symmetric: bool = True, full_range: bool = False
    ) -> Scheme:
        """The scheme `convert` uses for int8 (per channel by default) or int4 (groups of 128 by default).

        Raises InputError for a group size outside 32, 64, 128 and -1; foreign checkpoints may have others.
        """
        default = {"int8": PER_CHANNEL, "int4": 128}[dtype]
        size = default if group_size is None else group_size
        if size not in (*GROUP_SIZES, PER_CHANNEL):
            raise InputError("bad group size", expected="32, 64, 128 or -1 (per output channel)", found=size)
        return cls(int(dtype[3:]), size, symmetric, full_range)

    @property
    def dtype(self) -> str:
        return f"int{self.bits}"

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest signed code this scheme uses."""
        high = 2 ** (self.bits - 1) - 1
        low = -high if self.symmetric and not self.full_range else -high - 1
        return low, high

    def group_width(self, in_features: int) -> int:
        """Input features per group for a matrix with this many: the group size, or all of them."""
        return in_features if self.group_size == PER_CHANNEL else self.group_size

    def num_groups(self, in_features: int) -> int:
        """Groups along K; the last may be short."""
        return -(-in_features // self.group_width(in_features)) if in_features else 0
