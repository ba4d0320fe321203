"""The training text: what the base itself writes, kept with the hidden states it wrote it from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..calibration.container import read_container, write_container
from ..calibration.continuations import Trace, continuation_traces
from ..errors import InputError
from ..runtime.model import LlamaModel
from ..runtime.sampling import uniform

# Sampled continuations draw from this many tokens; as many of the base's logits are kept for `kl`.
_DRAWN_FROM, _KEPT_LOGITS = 50, 10
_HELD_OUT_EVERY = 20

# (states so far, states wanted)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CorpusOptions:
    """tokens: states to write in all. temperature: of every second prompt's continuation; the others are
    greedy. batch_size: prompts written together, and those of one file."""

    tokens: int
    max_new_tokens: int = 256
    temperature: float = 0.7
    batch_size: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """Rows of all files; each [n, ...] tensor is a list of mapped pieces.

    states: fp16 [n, H], final hidden states. chosen: int32 [n], the token the base wrote after each (t+1).
    left: int32 [n], rows that follow in the same text: head i's token t+2+i is chosen[row + 1 + i] where
    left[row] > i. top_ids, top_logits: int32 / fp16 [n, 10]. held: bool [n], rows of held-out texts.
    """

    states: list[Tensor]
    chosen: Tensor
    left: Tensor
    top_ids: Tensor
    top_logits: Tensor
    held: Tensor

    def rows(self, numbers: Tensor) -> Tensor:
        """States fp32 [m, H] of these rows."""
        found = torch.empty(numbers.numel(), self.states[0].shape[1])
        first = 0
        for piece in self.states:
            here = (numbers >= first) & (numbers < first + piece.shape[0])
            if bool(here.any()):
                found[here] = piece[numbers[here] - first].float()
            first += piece.shape[0]
        return found

    def usable(self, num_heads: int, held: bool) -> Tensor:
        """int64: rows with a token for head 0 at least, of held-out texts or of the others."""
        wanted = (self.left > 0) & (self.held == held)
        return wanted.nonzero().squeeze(1)

    def targets(self, numbers: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """(row that holds head's token of each row, clamped; whether there is one)."""
        place = numbers + 1 + head
        known = self.left[numbers] > head
        return torch.where(known, place, numbers), known


def write_corpus(
    model: LlamaModel,
    prompts: Sequence[list[int]],
    options: CorpusOptions,
    folder: Path,
    base: str,
    progress: Progress | None = None,
) -> Corpus:
    """Let the base continue prompts until there are options.tokens states; files in `folder` are reused.

    prompts: token ids. base: identifies the model. A folder of another run, and prompts that do not give
    enough text, raise InputError.
    """
    identity = hashlib.sha256(
        json.dumps([prompts, {**asdict(options), "tokens": 0}, base]).encode()
    ).hexdigest()
    parts: list[dict[str, Tensor]] = []
    seen = 0
    for start in range(0, len(prompts), options.batch_size):
        file = folder / f"text-{start // options.batch_size:05}.safetensors"
        if not file.exists():
            batch = prompts[start : start + options.batch_size]
            write_container(file, _write(model, batch, start, options), {"corpus": identity})
        part, content = read_container(file)
        if content.get("corpus") != identity:
            raise InputError(
                "text of another base, other prompts or options",
                file=file,
                fix="delete the folder or choose another --cache",
            )
        parts.append(part)
        seen += part["chosen"].numel()
        if progress is not None:
            progress(min(seen, options.tokens), options.tokens)
        if seen >= options.tokens:
            break
    if not seen:
        raise InputError("the base wrote nothing for these prompts")
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "states"}
    return Corpus([part["states"] for part in parts], **joined)


def _write(
    model: LlamaModel, prompts: Sequence[list[int]], first: int, options: CorpusOptions
) -> dict[str, Tensor]:
    def pick(slots: Sequence[int], step: int, ids: Tensor, logits: Tensor) -> Tensor:
        numbers = torch.tensor([uniform(options.seed + first + slot, step) for slot in slots])
        chances = torch.softmax(logits.double() / options.temperature, 1).cumsum(1)
        drawn = (chances < numbers.unsqueeze(1)).sum(1).clamp(max=ids.shape[1] - 1)
        sampled = torch.tensor([(first + slot) % 2 == 1 for slot in slots])
        return torch.where(sampled, drawn, 0)

    traces = continuation_traces(model, list(prompts), options.max_new_tokens, _DRAWN_FROM, pick)
    columns = [_columns(trace, first + number) for number, trace in enumerate(traces)]
    return {name: torch.cat([column[name] for column in columns]) for name in columns[0]}


def _columns(trace: Trace, number: int) -> dict[str, Tensor]:
    count = trace.chosen.numel()
    return {
        "states": trace.states.half(),
        "chosen": trace.chosen,
        "left": torch.arange(count - 1, -1, -1, dtype=torch.int32),
        "top_ids": trace.top_ids[:, :_KEPT_LOGITS].clone(),
        "top_logits": trace.top_logits[:, :_KEPT_LOGITS].half(),
        "held": torch.full((count,), number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1),
    }
