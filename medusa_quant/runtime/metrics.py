"""What a batch has done, by the names vLLM uses for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metrics:
    """Sums since the start. seconds: wall time by part of a step. accepted_per_position[i]: drafts of
    head i that were accepted; drafts: speculative steps, one a request."""

    generation_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("base", "verify", "heads"), 0.0))

    def record_draft(self, nodes: int, depth: int, accepted: int) -> None:
        """One request's verified tree of `nodes` nodes."""
        self.drafts += 1
        self.draft_tokens += nodes - 1
        self.accepted_tokens += accepted
        self.accepted_per_position += [0] * (depth - len(self.accepted_per_position))
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a speculative step yields, the base's own (bonus) token included; 1.0 without any."""
        return 1.0 + (self.accepted_tokens / self.drafts if self.drafts else 0.0)

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of speculative steps that accepted a draft of each head."""
        return [count / self.drafts for count in self.accepted_per_position] if self.drafts else []

    def as_dict(self) -> dict[str, Any]:
        return {
            "generation_tokens": self.generation_tokens,
            "prompt_tokens": self.prompt_tokens,
            "steps": self.steps,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_num_draft_tokens": self.draft_tokens,
            "spec_decode_num_accepted_tokens": self.accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate_per_position": self.acceptance_rate_per_position,
            "num_preemptions": self.preemptions,
            "seconds": dict(self.seconds),
        }
