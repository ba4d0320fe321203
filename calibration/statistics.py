"""`Statistics`: what calibration knows of a base's final hidden states, as one safetensors file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .container import read_container, write_container

FORMAT_VERSION = 1


@dataclass
class Statistics:
    """Final hidden states (after the final norm) seen on prompts, split by prompt into two sets.

    Calibration set:
        second_moment: fp64 [H, H], the sum over its `tokens` states of x x^T.
        absmax: fp32 [H]. states: fp32 [S, H], a uniform sample of its states.
    Held-out set (no prompt in common with the other):
        held_states: fp32 [P, H].
        held_next: int32 [P, D]: the base's own tokens after each state, t+1, t+2, ...; -1 beyond the end.
        held_top_ids, held_top_logits: int32 / fp32 [P, k], the base's largest logits for t+1.
    base: path, hidden_size, vocab_size and names of the model. options: as collected.
    """

    second_moment: Tensor
    absmax: Tensor
    states: Tensor
    held_states: Tensor
    held_next: Tensor
    held_top_ids: Tensor
    held_top_logits: Tensor
    tokens: int
    held_tokens: int
    prompts: int
    base: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        return int(self.second_moment.shape[0])

    @property
    def vocab_size(self) -> int:
        return int(self.base["vocab_size"])

    def mean_second_moment(self) -> Tensor:
        """fp64 [H, H]: E[x x^T] over the calibration set. Raises InputError if it is empty or not finite."""
        if self.tokens < 1:
            raise InputError("the statistics hold no calibration states", fix="calibrate on more prompts")
        mean = self.second_moment / self.tokens
        if not bool(torch.isfinite(mean).all()):
            raise InputError("the statistics hold NaN or Inf", fix="run `medusa-quant calibrate` again")
        return mean

    def save(self, path: Path) -> None:
        """Write atomically: an interrupted write leaves an older file whole."""
        tensors, rest = {}, {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = value.contiguous()
            else:
                rest[name] = value
        write_container(path, tensors, {"format_version": FORMAT_VERSION, **rest})

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Raises InputError if the file is missing, damaged, or not written by `medusa-quant calibrate`."""
        file = Path(path).expanduser()
        tensors, content = read_container(file)
        version = content.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise InputError(
                "unsupported version of calibration statistics",
                file=file,
                expected=FORMAT_VERSION,
                found=version,
            )
        try:
            fields: dict[str, Any] = {**tensors, **content}
            return cls(**fields)
        except TypeError as error:
            raise InputError(f"damaged calibration statistics: {error}", file=file) from error

    def check_fits(self, hidden_size: int, vocab_size: int | None, heads: str) -> None:
        """Raise InputError where heads of these sizes cannot belong to the base that was calibrated on."""
        base = self.base.get("path", "the base")
        if self.hidden_size != hidden_size:
            raise InputError(
                f"calibration of {base} does not fit these heads: hidden size differs",
                file=heads,
                expected=f"H {hidden_size}",
                found=f"H {self.hidden_size}",
            )
        if vocab_size is not None and vocab_size != self.vocab_size:
            raise InputError(
                f"calibration of {base} does not fit these heads: vocabulary size differs",
                file=heads,
                expected=f"V {vocab_size}",
                found=f"V {self.vocab_size}",
            )


def as_options(value: Any) -> dict[str, Any]:
    """A dataclass of options as plain JSON values."""
    return dict(asdict(value))
