"""The endpoints: a request is checked whole before it is queued, then the engine's stream is the rule."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ..errors import InputError
from ..runtime.engine import Engine, Output
from ..runtime.request import SamplingParams
from .guard import Guard, error
from .metrics import ServerMetrics
from .protocol import ChatBody, CompletionBody, Reply, finish_reason

_COMPLETION_TOKENS = 16  # the API's default


@dataclass(frozen=True)
class Limits:
    """max_queue: requests waiting for a slot. max_body: bytes. timeout: seconds a request may take."""

    max_queue: int = 64
    max_body: int = 1_000_000
    timeout: float | None = None


class _Refused(Exception):
    def __init__(self, response: JSONResponse) -> None:
        self.response = response


class Service:
    """The engine behind the endpoints, and who is being served."""

    def __init__(self, engine: Engine, model: str, limits: Limits) -> None:
        self.engine, self.model, self.limits = engine, model, limits
        self.metrics, self.draining, self._active = ServerMetrics(engine, model), False, 0

    def admit(self, count: int) -> None:
        """Take `count` texts in, or refuse with 429 (503 while draining)."""
        if self.draining:
            raise _Refused(error(503, "the server is shutting down"))
        room = self.engine.batch.max_batch + self.limits.max_queue
        if self._active + count > room:
            raise _Refused(error(429, f"{self._active} requests are being served or wait; {room} at most"))
        self._active += count

    def release(self, count: int) -> None:
        self._active -= count

    def tokens_of(self, body: CompletionBody | ChatBody) -> list[list[int]]:
        if isinstance(body, ChatBody):
            return [self.engine.encode_messages([message.plain() for message in body.messages])]
        return [
            self.engine.encode(prompt, chat=False) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]

    def room_for(self, body: CompletionBody | ChatBody, prompt: list[int]) -> int:
        """Tokens that may be written. Raises _Refused with the numbers where the context is too small."""
        context = self.engine.batch.max_len
        wanted = body.max_tokens
        if isinstance(body, ChatBody):
            wanted = body.max_completion_tokens or body.max_tokens
        elif wanted is None:
            wanted = min(_COMPLETION_TOKENS, max(1, context - len(prompt)))
        if len(prompt) + (wanted or 1) > context:
            asked = f"{wanted} to write" if wanted else "room for an answer"
            message = f"the context holds {context} tokens; the prompt has {len(prompt)}, with {asked}"
            raise _Refused(error(400, message, "max_tokens", "context_length_exceeded"))
        return wanted or context - len(prompt)

    async def pieces(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[str | Output, None]:
        """The engine's stream, timed. Leaving it early cancels the request."""
        started, first = time.perf_counter(), None
        stream = self.engine.stream(prompt, params, timeout=self.limits.timeout)
        ended = "cancelled"
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    now = time.perf_counter()
                    if first is None:
                        first = now
                        self.metrics.first_token.observe(now - started)
                    if isinstance(piece, Output):
                        ended = piece.finish_reason
                        if len(piece.token_ids) > 1:
                            gap = (now - first) / (len(piece.token_ids) - 1)
                            self.metrics.between_tokens.observe(gap)
                    yield piece
        finally:
            self.metrics.finished[ended] += 1


def build_app(service: Service, api_key: str | None = None) -> FastAPI:
    app = FastAPI(title="medusa-quant", openapi_url=None)
    app.add_middleware(Guard, max_body=service.limits.max_body, api_key=api_key)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, failure: RequestValidationError) -> JSONResponse:
        first = failure.errors()[0]
        if first["type"] == "json_invalid":
            return error(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
        place = [str(part) for part in first["loc"][1:]]
        said = "is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        return error(400, f"{'.'.join(place) or 'body'}: {said}", place[0] if place else None)

    @app.exception_handler(InputError)
    async def wrong(request: Request, failure: InputError) -> JSONResponse:
        return error(400, str(failure))

    @app.exception_handler(_Refused)
    async def refused(request: Request, failure: _Refused) -> JSONResponse:
        return failure.response

    @app.exception_handler(HTTPException)
    async def other(request: Request, failure: HTTPException) -> JSONResponse:
        return error(failure.status_code, f"{request.method} {request.url.path}: {failure.detail}")

    @app.get("/health")
    async def health() -> Response:
        return error(503, "the server is shutting down") if service.draining else Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        context = service.engine.batch.max_len
        entry = {"id": service.model, "object": "model", "created": 0, "owned_by": "medusa-quant"}
        return {"object": "list", "data": [{**entry, "max_model_len": context}]}

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(service, body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answer(service, body, request)

    return app


async def _answer(service: Service, body: CompletionBody | ChatBody, request: Request) -> Response:
    if body.model != service.model:
        message = f"there is no model {body.model!r}; this server has {service.model!r}"
        return error(404, message, "model", "model_not_found")
    # Tokenizing a long prompt must not hold up everyone's streams.
    prompts = await asyncio.to_thread(service.tokens_of, body)
    if not prompts or (body.stream and len(prompts) > 1):
        return error(400, "prompt: one text where the answer is streamed, at least one otherwise", "prompt")
    jobs = [(prompt, body.sampling(service.room_for(body, prompt))) for prompt in prompts]
    for prompt, _ in jobs:
        service.engine.check(prompt)
    reply = Reply(service.model, isinstance(body, ChatBody))
    service.admit(len(jobs))
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        events = _events(service, reply, *jobs[0], with_usage)
        return _EventStream(events, lambda: service.release(1))
    try:
        work = asyncio.gather(*(_whole(service, *job) for job in jobs))
        gone = asyncio.ensure_future(_disconnected(request))
        either: set[asyncio.Future[Any]] = {work, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            return Response(status_code=499)
        return JSONResponse(reply.whole(list(work.result())))
    finally:
        service.release(len(jobs))


async def _whole(service: Service, prompt: list[int], params: SamplingParams) -> Output:
    async with aclosing(service.pieces(prompt, params)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Output):
                return piece
    raise RuntimeError("a stream ended without its output")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events. A client that leaves before the first must be counted out too, and then `events`
    never runs: so it is done here."""

    def __init__(self, events: AsyncGenerator[str, None], done: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._done()


async def _events(
    service: Service, reply: Reply, prompt: list[int], params: SamplingParams, with_usage: bool
) -> AsyncGenerator[str, None]:
    first = True
    async with aclosing(service.pieces(prompt, params)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Output):
                yield _event(reply.chunk(None, finish_reason(piece), first))
                if with_usage:
                    yield _event(reply.usage_chunk(piece))
            else:
                yield _event(reply.chunk(piece, None, first))
            first = False
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
