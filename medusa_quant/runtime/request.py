"""A request: what to generate, how, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import InputError
from .posterior import TYPICAL_ALPHA, TYPICAL_EPS

ACCEPTANCE_RULES = ("exact", "typical")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature 0: greedy. top_k 0 and top_p 1: no cut. seed: draws depend on it and the position alone
    (None: 0). stop: strings that end the text and are left out of it. stop_token_ids: beside the model's
    own end tokens, which ignore_eos switches off. acceptance: "exact" keeps the base's distribution;
    "typical" does not (with temperature > 0 only): see `posterior.evaluate_typical`.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    acceptance: str = "exact"
    typical_eps: float = TYPICAL_EPS
    typical_alpha: float = TYPICAL_ALPHA

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise InputError("bad max_tokens", expected="0 or more", found=self.max_tokens)
        if not self.temperature >= 0:
            raise InputError("bad temperature", expected="0 or more", found=self.temperature)
        if not 0 < self.top_p <= 1:
            raise InputError("bad top_p", expected="above 0, at most 1", found=self.top_p)
        if self.top_k < 0:
            raise InputError("bad top_k", expected="0 (off) or more", found=self.top_k)
        if self.acceptance not in ACCEPTANCE_RULES:
            raise InputError(
                "bad acceptance rule", expected=" | ".join(ACCEPTANCE_RULES), found=self.acceptance
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise InputError("stop must be a list of non-empty strings", found=self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass
class Request:
    """One prompt on its way through the batch.

    tokens: prompt and what was generated. on_tokens: called with the new tokens of each step.
    deadline: `time.monotonic()` after which it ends. finish_reason: None while running, then "stop",
    "length", "cancelled" or "deadline". steps, accepted: of speculation, for the metrics.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    on_tokens: Callable[[Request, list[int]], None] | None = None
    deadline: float | None = None
    tokens: list[int] = field(init=False)
    finish_reason: str | None = None
    text: str = ""
    steps: int = 0
    accepted: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]
