"""What is compared, and how rows are named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..quantization import parse_dtype
from ..quantization.scheme import INT_DTYPES

PLAIN = "plain"


@dataclass(frozen=True)
class Variant:
    """The heads in one dtype, by one method. group_size: None for the dtype's default."""

    dtype: str
    method: str
    group_size: int | None = None

    @property
    def name(self) -> str:
        parts = [self.dtype]
        if self.group_size is not None:
            parts.append(f"g{self.group_size}" if self.group_size > 0 else "per-channel")
        if self.method != "rtn":
            parts.append(self.method)
        return "-".join(parts)


@dataclass(frozen=True)
class Settings:
    """All that makes two comparisons the same one.

    prompts: token ids. trees: `auto` (chosen per step), or what a fixed tree is named by. repeats: of every
    row, in turn. lm_head: `own` expands heads that share the base's LM matrix to one each.
    """

    base: str
    heads: str
    variants: tuple[Variant, ...]
    batches: tuple[int, ...]
    trees: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    repeats: int
    base_dtype: str
    base_activation: str
    heads_activation: str
    lm_head: str

    def __post_init__(self) -> None:
        for flag, counts in (
            ("--batch", self.batches),
            ("--tokens", (self.tokens,)),
            ("--repeats", (self.repeats,)),
        ):
            if not counts or min(counts) < 1:
                raise InputError(f"bad {flag}", expected="1 or more", found=counts)
        if self.lm_head not in ("own", "shared"):
            raise InputError("bad --lm-head", expected="own | shared", found=self.lm_head)
        if not self.variants or not self.trees:
            raise InputError("nothing to compare", fix="name --dtypes and --trees")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(variant, tree) of every row, plain decoding first."""
        return [(PLAIN, ""), *((v.name, tree) for v in self.variants for tree in self.trees)]

    def as_dict(self) -> dict[str, Any]:
        content = asdict(self)
        content["prompts"] = len(self.prompts)
        content["variants"] = [variant.name for variant in self.variants]
        return content


def variants_of(dtypes: str, methods: str, group_size: int | None) -> tuple[Variant, ...]:
    """Comma-separated dtypes and methods as variants; float dtypes have no method.

    group_size: of int4 (int8 keeps a scale per output channel). Raises InputError for unknown dtypes.
    """
    found: dict[str, Variant] = {}
    for dtype in (parse_dtype(name) for name in split(dtypes)):
        for method in split(methods) if dtype in INT_DTYPES else ["rtn"]:
            variant = Variant(dtype, method, group_size if dtype == "int4" else None)
            found.setdefault(variant.name, variant)
    return tuple(found.values())


def split(text: str) -> list[str]:
    """Parts of a comma-separated list, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def counts(flag: str, text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers. Raises InputError for anything else."""
    try:
        return tuple(int(part) for part in split(text))
    except ValueError:
        raise InputError(f"bad {flag}", expected="whole numbers, separated by commas", found=text) from None


def tree_name(tree: str) -> str:
    """How a row names its tree: a file by its stem."""
    return Path(tree).stem if Path(tree).suffix else tree


def file_names_differ(trees: Sequence[str]) -> bool:
    return len({tree_name(tree) for tree in trees}) == len(trees)
