"""`Engine`: prompts in, text out; whole or as streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..checkpoints import MedusaHeads, load_heads
from ..errors import InputError
from .batch import LlamaBatch
from .chat import encode_chat
from .heads import DraftHeads
from .metrics import Metrics
from .model import LlamaModel, load_base, load_tokenizer
from .request import Request, SamplingParams
from .speculation import Speculation
from .text import Detokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Output:
    """What became of one prompt. acceptance_length: mean tokens a speculative step yielded, or None."""

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    acceptance_length: float | None


@dataclass(eq=False)
class _Job:
    request: Request
    text: Detokenizer
    on_text: Callable[[str], None] | None = None
    done: Callable[[Output], None] | None = None
    failed: Callable[[BaseException], None] | None = None
    pieces: list[str] = field(default_factory=list)


class Engine:
    """A base, its tokenizer and draft heads behind a `LlamaBatch`.

    base: a path or repo id (see `load_base`), or a loaded model with its tokenizer. heads: a path, loaded
    heads (packed for this base already, or not), or None. base_activation, heads_activation: "int8" or
    "exact", for integer weights. speculation: auto, tree, chain or off. tree: none, chain, default, deep or
    a file. The rest goes to `LlamaBatch`.
    """

    def __init__(
        self,
        base: str | Path | LlamaModel,
        heads: str | Path | MedusaHeads | DraftHeads | None = None,
        *,
        tokenizer: Any = None,
        base_dtype: str = "fp32",
        base_activation: str = "int8",
        heads_activation: str = "int8",
        device: str = "cpu",
        speculation: str = "auto",
        tree: str = "default",
        **batch: Any,
    ) -> None:
        if isinstance(base, LlamaModel):
            self.base = base
        else:
            self.base = load_base(base, base_dtype, activation=base_activation, device=device)
            tokenizer = tokenizer or load_tokenizer(base)
        if tokenizer is None:
            raise InputError("a loaded base needs its tokenizer", fix="pass tokenizer=")
        self.tokenizer = tokenizer
        if isinstance(heads, str | Path):
            heads = load_heads(heads)
        if isinstance(heads, MedusaHeads):
            heads = DraftHeads(heads, self.base, heads_activation)
        self.heads = heads
        policy = Speculation.named(
            speculation if self.heads else "off", tree, self.heads.num_heads if self.heads else 0
        )
        self.batch = LlamaBatch(self.base, self.heads, speculation=policy, **batch)
        self._ids = count()
        self._lock = threading.Lock()  # of the batch; held during a step
        self._waking = threading.Lock()  # of the decision that a worker ends or is needed
        self._jobs: dict[str, _Job] = {}
        self._worker: threading.Thread | None = None

    @property
    def metrics(self) -> Metrics:
        return self.batch.metrics

    def encode(self, prompt: str, chat: bool = True) -> list[int]:
        """Token ids of a prompt, as a user's message in the model's chat template where it has one."""
        if chat and getattr(self.tokenizer, "chat_template", None):
            return self.encode_messages([{"role": "user", "content": prompt}])
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the model answers; see `encode_chat`."""
        return encode_chat(self.tokenizer, messages)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = True,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Output]:
        """Run prompts (text or token ids) to their end, batched. on_text: called with (prompt's number, new
        text) as it settles. Raises InputError for a prompt that cannot run, before any does."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if single else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        outputs: dict[int, Output] = {}
        jobs = []
        for number, (prompt, own) in enumerate(zip(listed, params, strict=True)):
            job = self._job(prompt, own, chat)
            if on_text is not None:
                job.on_text = lambda text, number=number: on_text(number, text)
            job.done = lambda output, number=number: outputs.__setitem__(number, output)
            jobs.append(job)
        self._submit(jobs)
        while len(outputs) < len(jobs):
            self._step()
        return [outputs[number] for number in range(len(jobs))]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        timeout: float | None = None,
    ) -> AsyncGenerator[str | Output, None]:
        """Pieces of text as they settle, then the `Output`. Leaving the loop early cancels the request.

        timeout: seconds after which it ends with what there is.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | Output | BaseException] = asyncio.Queue()
        job = self._job(prompt, params or SamplingParams(), chat)
        if timeout is not None:
            job.request.deadline = time.monotonic() + timeout

        def put(piece: str | Output | BaseException) -> None:
            # The loop may have ended before the request did.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        job.on_text = job.done = job.failed = put
        try:
            # A step holds the lock: waiting for it here would hold up every other stream.
            await loop.run_in_executor(None, self._submit, [job])
            self._start_worker()
            while True:
                piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise RuntimeError("the engine has failed") from piece
                yield piece
                if isinstance(piece, Output):
                    return
        finally:
            if job.request.finish_reason is None:
                loop.run_in_executor(None, self.cancel, job.request)

    def check(self, prompt: Sequence[int]) -> None:
        """Raise InputError for a prompt that cannot run; see `LlamaBatch.check`."""
        self.batch.check(Request("", prompt))

    def close(self) -> None:
        """End every request and the worker's thread; what is streamed ends as cancelled."""
        with self._lock:
            requests = [job.request for job in self._jobs.values()]
            for request in requests:
                self.batch.cancel(request)
            self._collect(requests)
        worker = self._worker
        if worker is not None:
            worker.join()

    def cancel(self, request: Request) -> None:
        """End a request; does nothing if it has ended."""
        with self._lock:
            self.batch.cancel(request)
            self._collect([request])

    def _job(self, prompt: Prompt, params: SamplingParams, chat: bool) -> _Job:
        tokens = self.encode(prompt, chat) if isinstance(prompt, str) else [int(token) for token in prompt]
        request = Request(f"request-{next(self._ids)}", tokens, params)
        job = _Job(request, Detokenizer(self.tokenizer, params.stop))
        request.on_tokens = lambda _, new: self._on_tokens(job, new)
        return job

    def _submit(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            for job in jobs:
                self.batch.check(job.request)
            for job in jobs:
                # A stream may be left before its turn has come here.
                if job.request.finish_reason is None:
                    self._jobs[job.request.id] = job
                    self.batch.add(job.request)
            self._collect([job.request for job in jobs])

    def _on_tokens(self, job: _Job, new: Sequence[int]) -> None:
        for token in new:
            text = job.text.add(token)
            if text and job.on_text:
                job.on_text(text)
            if job.text.stopped:
                self.batch.finish(job.request, "stop")
                return

    def _step(self) -> None:
        with self._lock:
            self._collect(self.batch.step())

    def _collect(self, requests: Sequence[Request]) -> None:
        for request in requests:
            job = self._jobs.get(request.id)
            if job is None or request.finish_reason is None:
                continue
            del self._jobs[request.id]
            rest = "" if job.text.stopped else job.text.flush()
            if rest and job.on_text:
                job.on_text(rest)
            length = 1.0 + request.accepted / request.steps if request.steps else None
            output = Output(
                len(request.prompt), request.generated, job.text.text, request.finish_reason, length
            )
            if job.done:
                job.done(output)

    def _start_worker(self) -> None:
        with self._waking:
            if self._worker is None or not self._worker.is_alive():
                self._worker = threading.Thread(target=self._work, name="medusa-quant-engine", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        try:
            while self._more_work():
                self._step()
                # Lets a waiting `submit` or `cancel` have the lock: it is not a fair one.
                time.sleep(0)
        except BaseException as error:
            # Streams would wait for ever for a thread that has died.
            with self._lock:
                jobs, self._jobs = list(self._jobs.values()), {}
                for job in jobs:
                    self.batch.cancel(job.request)
            for job in jobs:
                if job.failed:
                    job.failed(error)
            raise

    def _more_work(self) -> bool:
        with self._waking, self._lock:
            if not self.batch.has_work:
                self._worker = None
            return self.batch.has_work
