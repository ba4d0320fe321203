"""`calibrate`: streaming statistics of a base's final hidden states over prompts, resumable at any batch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import InputError
from ..runtime.chat import encode_chat
from ..runtime.model import LlamaModel
from .container import read_container, write_container
from .continuations import Trace, continuation_traces, text_traces
from .prompts import Prompt
from .sample import BottomKSample
from .statistics import Statistics, as_options

# One prompt of every block of this many is held out.
_HELD_OUT_BLOCK = 4
_TOP_LOGITS = 10
_SECONDS_BETWEEN_SAVES = 20.0

# (states so far, states wanted or None, states per second of this run)
Progress = Callable[[int, "int | None", float], None]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer used here."""

    chat_template: Any

    def __call__(self, text: str) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class CollectOptions:
    """tokens: states to collect in all, None for all the prompts give. lookahead: base tokens kept after
    each held-out state. calibration_states, held_out_states: sizes of the two stored samples."""

    tokens: int | None = None
    max_new_tokens: int = 256
    generate: bool = True
    seed: int = 0
    batch_size: int = 16
    lookahead: int = 16
    calibration_states: int = 8192
    held_out_states: int = 8192

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "batch_size", "calibration_states", "held_out_states"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"bad {flag}", expected="1 or more", found=value)


@dataclass(frozen=True)
class Collected:
    """statistics: as saved. warnings: what was cut or unusual. resumed: states an earlier run had left."""

    statistics: Statistics
    warnings: list[str]
    resumed: int


def collect(
    model: LlamaModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    options: CollectOptions,
    partial: Path,
    base: dict[str, Any],
    progress: Progress | None = None,
) -> Collected:
    """Run the base over prompts and gather `Statistics`.

    partial: where an unfinished run is kept; if the file belongs to the same run it is continued, and the
        result is the same, bit for bit, as that of a run without interruption. Removed by the caller.
    base: path, hidden_size, vocab_size and so on, recorded as it is.
    Raises InputError for prompts that leave nothing to hold out, or a partial file of another run.
    """
    context = model.config.max_position_embeddings
    room = options.max_new_tokens if options.generate else 0
    encoded, warnings = encode_prompts(tokenizer, prompts, room, context, options.generate)
    run = _Run(model.config.hidden_size, options, _held_out(len(encoded), options.seed))
    fingerprint = _fingerprint(encoded, options, base)
    run.resume(partial, fingerprint)
    resumed, started, saved = run.seen, time.monotonic(), time.monotonic()
    try:
        while run.next_prompt < len(encoded) and not run.full:
            batch = encoded[run.next_prompt : run.next_prompt + options.batch_size]
            if options.generate:
                traces = continuation_traces(model, batch, options.max_new_tokens, _TOP_LOGITS)
            else:
                traces = text_traces(model, batch, _TOP_LOGITS)
            for trace in traces:
                run.add(trace)
            if progress is not None:
                elapsed = max(1e-9, time.monotonic() - started)
                progress(run.seen, _goal(run, len(encoded)), (run.seen - resumed) / elapsed)
            if time.monotonic() - saved > _SECONDS_BETWEEN_SAVES:
                run.store(partial, fingerprint)
                saved = time.monotonic()
    except BaseException:
        run.store(partial, fingerprint)
        raise
    return Collected(run.statistics(base), warnings, resumed)


class _Run:
    """The accumulators of a run, and where it stands."""

    def __init__(self, hidden_size: int, options: CollectOptions, held_out: set[int]) -> None:
        self.options, self.held_out = options, held_out
        self.second_moment = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
        self.absmax = torch.zeros(hidden_size)
        self.calibration = BottomKSample(options.calibration_states, options.seed)
        self.held = BottomKSample(options.held_out_states, options.seed)
        self.tokens = self.held_tokens = self.next_prompt = 0

    @property
    def seen(self) -> int:
        return self.tokens + self.held_tokens

    @property
    def full(self) -> bool:
        return self.options.tokens is not None and self.seen >= self.options.tokens

    def add(self, trace: Trace) -> None:
        prompt, self.next_prompt = self.next_prompt, self.next_prompt + 1
        if self.options.tokens is not None:
            trace = trace.first(self.options.tokens - self.seen)
        states = trace.states.float()
        if not states.shape[0]:
            return
        if prompt in self.held_out:
            self.held_tokens += states.shape[0]
            columns = {"states": states, "next": trace.next_tokens(self.options.lookahead)}
            columns |= {"top_ids": trace.top_ids, "top_logits": trace.top_logits}
            self.held.add(prompt, columns)
            return
        self.tokens += states.shape[0]
        wide = states.double()
        self.second_moment += wide.t() @ wide
        self.absmax = torch.maximum(self.absmax, states.abs().amax(0))
        self.calibration.add(prompt, {"states": states})

    def store(self, path: Path, fingerprint: str) -> None:
        tensors = {"second_moment": self.second_moment, "absmax": self.absmax}
        tensors |= {f"calibration.{name}": part for name, part in self.calibration.columns.items()}
        tensors |= {f"held.{name}": part for name, part in self.held.columns.items()}
        counts = {name: getattr(self, name) for name in ("tokens", "held_tokens", "next_prompt")}
        write_container(path, tensors, {"partial": fingerprint, **counts})

    def resume(self, path: Path, fingerprint: str) -> None:
        if not path.exists():
            return
        tensors, content = read_container(path)
        if content.get("partial") != fingerprint:
            raise InputError(
                "left by an unfinished run with other prompts, options or base",
                file=path,
                fix="repeat that run, or delete the file",
            )
        self.second_moment, self.absmax = tensors.pop("second_moment"), tensors.pop("absmax")
        for key, tensor in tensors.items():
            sample, name = key.split(".")
            getattr(self, sample).columns[name] = tensor
        for name in ("tokens", "held_tokens", "next_prompt"):
            setattr(self, name, content[name])

    def statistics(self, base: dict[str, Any]) -> Statistics:
        hidden, held = self.second_moment.shape[0], self.held.columns
        empty = torch.empty
        return Statistics(
            self.second_moment,
            self.absmax,
            self.calibration.columns.get("states", empty(0, hidden)),
            held.get("states", empty(0, hidden)),
            held.get("next", empty(0, self.options.lookahead, dtype=torch.int32)),
            held.get("top_ids", empty(0, _TOP_LOGITS, dtype=torch.int32)),
            held.get("top_logits", empty(0, _TOP_LOGITS)),
            self.tokens,
            self.held_tokens,
            self.next_prompt,
            base,
            as_options(self.options),
        )


def _held_out(prompts: int, seed: int) -> set[int]:
    """One prompt of each block of four, chosen by the seed; a last block of one is not held out."""
    generator = torch.Generator().manual_seed(seed)
    held = set()
    for start in range(0, prompts, _HELD_OUT_BLOCK):
        size = min(_HELD_OUT_BLOCK, prompts - start)
        offset = int(torch.randint(0, _HELD_OUT_BLOCK, (1,), generator=generator)) % size
        if size > 1:
            held.add(start + offset)
    return held


def base_identity(source: str, model: LlamaModel, dtype: str) -> dict[str, Any]:
    """What statistics say of the base they were collected on."""
    path, config = Path(source).expanduser(), model.config
    return {
        "path": str(path.resolve()) if path.exists() else source,
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "dtype": dtype,
    }


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    context: int,
    answer: bool = True,
) -> tuple[list[list[int]], list[str]]:
    """Token ids of prompts in the chat template, and warnings.

    answer: up to where the model answers. Prompts that leave no room for max_new_tokens keep their end.
    Raises InputError for a prompt without tokens, or where nothing would fit.
    """
    room = context - max_new_tokens
    if room < 1:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt",
            expected=f"less than the base's context of {context}",
        )
    warnings, encoded, cut = [], [], 0
    if not tokenizer.chat_template:
        warnings.append("the tokenizer has no chat template: prompts are given to the base as plain text")
    for number, prompt in enumerate(prompts, 1):
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        tokens = encode_chat(tokenizer, messages, answer)
        if not tokens:
            raise InputError(f"prompt {number} has no tokens", fix="remove it")
        cut += len(tokens) > room
        encoded.append(tokens[-room:])
    if cut:
        warnings.append(f"{cut} prompts are longer than {room} tokens: only their last {room} are used")
    return encoded, warnings


def _goal(run: _Run, prompts: int) -> int | None:
    """States the whole run will give, extrapolated from the prompts done."""
    estimate = int(run.seen / run.next_prompt * prompts)
    wanted = run.options.tokens
    return estimate if wanted is None else min(wanted, estimate)


def _fingerprint(encoded: list[list[int]], options: CollectOptions, base: dict[str, Any]) -> str:
    content = json.dumps([encoded, as_options(options), base], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
