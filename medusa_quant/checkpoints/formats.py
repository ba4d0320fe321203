"""Key naming of the checkpoint formats: which head, layer and part a key stands for, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

RESBLOCK, LM_HEAD, TOKEN_MAP = "resblock", "lm_head", "token_map"


class KeyParts(NamedTuple):
    """head and layer are 0-based; an LM matrix has its written layer (L), or -1 where the key has none.
    part: weight, bias, qweight, ..."""

    module: str
    head: int
    layer: int
    part: str


@dataclass(frozen=True)
class KeyFormat:
    """Naming of one family of checkpoints.

    resblock, lm_head: templates with {h}, {l} (LM matrix: the number of layers L) and {part}.
    prefixes: strings that may stand before any key.
    """

    name: str
    resblock: str
    lm_head: str
    prefixes: tuple[str, ...] = ("",)

    def parse(self, key: str) -> KeyParts | None:
        """What a key stands for, or None if it is not of this format."""
        for prefix in self.prefixes:
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if rest == TOKEN_MAP:
                return KeyParts(TOKEN_MAP, 0, -1, "weight")
            match = _pattern(self.resblock).fullmatch(rest)
            if match:
                return KeyParts(RESBLOCK, int(match["h"]), int(match["l"]), match["part"])
            match = _pattern(self.lm_head).fullmatch(rest)
            if match:
                layer = int(match["l"]) if "l" in match.groupdict() else -1
                return KeyParts(LM_HEAD, int(match["h"]), layer, match["part"])
        return None

    def resblock_key(self, head: int, layer: int, part: str) -> str:
        return self.resblock.format(h=head, l=layer, part=part)

    def lm_head_key(self, head: int, num_layers: int, part: str) -> str:
        return self.lm_head.format(h=head, l=num_layers, part=part)


MEDUSA = KeyFormat(
    "medusa",
    "{h}.{l}.linear.{part}",
    "{h}.{l}.{part}",
    ("", "medusa_head.", "model.medusa_head.", "model."),
)
VLLM = KeyFormat(
    "vllm",
    "blocks.{h}.layers.{l}.{part}",
    "lm_heads.{h}.{part}",
    ("", "medusa_heads.", "model."),
)
TENSORRT_LLM = KeyFormat(
    "tensorrt-llm",
    "medusa_heads.{h}.medusa_layers.{l}.linear.{part}",
    "medusa_heads.{h}.lm_head.{part}",
)
FORMATS = (MEDUSA, VLLM, TENSORRT_LLM)

# Keys of the base model that a merged checkpoint may hold beside the heads.
BASE_PREFIXES = ("model.", "lm_head.", "transformer.")


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for field, group in (
        ("h", r"(?P<h>\d+)"),
        ("l", r"(?P<l>\d+)"),
        ("part", r"(?P<part>[A-Za-z_]+(\.\w+)*)"),
    ):
        escaped = escaped.replace(re.escape("{" + field + "}"), group)
    return re.compile(escaped)
