"""Timing: every row on the same prompts, side by side, and its text held against plain decoding's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..errors import VerifyError
from ..runtime.engine import Engine
from ..runtime.heads import DraftHeads
from ..runtime.metrics import Metrics
from ..runtime.model import LlamaModel
from ..runtime.request import SamplingParams
from .results import Run
from .settings import Settings, tree_name

_WARM_UP_TOKENS = 24


class Bench:
    """A base with several packed heads, run row by row."""

    def __init__(
        self, settings: Settings, base: LlamaModel, tokenizer: Any, heads: dict[str, DraftHeads]
    ) -> None:
        self.settings, self._base, self._tokenizer, self._heads = settings, base, tokenizer, heads
        longest = max(len(prompt) for prompt in settings.prompts)
        self._max_len = min(longest + settings.tokens + 1, base.config.max_position_embeddings)

    def run(self, variant: str, tree: str, batch: int, repeat: int) -> tuple[Run, list[list[int]]]:
        """Run one row once; also the tokens it wrote."""
        heads = self._heads.get(variant)
        engine = Engine(
            self._base,
            heads,
            tokenizer=self._tokenizer,
            speculation="off" if heads is None else "auto" if tree == "auto" else "tree",
            tree="default" if tree == "auto" else tree or "none",
            max_batch=batch,
            max_len=self._max_len,
        )
        prompts = [list(prompt) for prompt in self.settings.prompts]
        # All slots busy, as later: kernels and the choice of trees settle before the clock starts.
        engine.generate(prompts[:batch], SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True))
        engine.batch.metrics = metrics = Metrics()
        params = SamplingParams(max_tokens=self.settings.tokens, ignore_eos=True)
        started = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        tokens = [output.token_ids for output in outputs]
        run = Run(
            variant,
            tree_name(tree),
            batch,
            repeat,
            sum(map(len, tokens)),
            seconds,
            metrics.steps,
            dict(metrics.seconds),
            metrics.mean_acceptance_length,
            metrics.acceptance_rate_per_position,
            metrics.draft_tokens / metrics.drafts + 1 if metrics.drafts else 1.0,
        )
        return run, tokens


def check_identity(
    what: str, tokens: Sequence[list[int]], reference: Sequence[list[int]], tokenizer: Any
) -> None:
    """Raise VerifyError with the first difference where a row's text is not plain greedy decoding's."""
    for number, (found, wanted) in enumerate(zip(tokens, reference, strict=True)):
        if found == wanted:
            continue
        place = next(
            (at for at, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
            min(len(found), len(wanted)),
        )
        shown = [tokenizer.decode(text[max(0, place - 8) : place + 8]) for text in (wanted, found)]
        raise VerifyError(
            f"{what}: prompt {number} differs from plain greedy decoding at token {place}: "
            f"plain {shown[0]!r}, here {shown[1]!r}"
        )
