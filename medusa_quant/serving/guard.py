"""What stands before the endpoints: the API key and the size of a body. Plain ASGI, so that streams and
disconnects pass through untouched."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(status)
    content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(content, status, headers)


class Guard:
    """max_body: bytes. api_key: asked for under /v1, where given."""

    def __init__(self, app: App, max_body: int, api_key: str | None) -> None:
        self._app, self._max_body = app, max_body
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"].startswith("/v1"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                answer = error(401, "missing or wrong API key", code="invalid_api_key")
                await answer(scope, receive, send)
                return
        declared = headers.get(b"content-length", b"0")
        body = await self._read(receive) if int(declared) <= self._max_body else None
        if body is None:
            answer = error(413, f"the body is larger than {self._max_body:,} bytes")
            await answer(scope, receive, send)
            return
        replayed = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or None where it is too large, whatever its headers say."""
        parts, size = [], 0
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)
