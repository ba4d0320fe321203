"""Listening: a socket bound before anything is loaded, and an end that waits for who is being served."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..errors import InputError
from .app import Service


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises InputError where the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {error}", fix="choose another --port or --host"
        ) from error
    return listener


class Server(uvicorn.Server):
    """Ends on SIGTERM or SIGINT when every request is answered, or after the drain time."""

    def __init__(self, app: FastAPI, service: Service, drain_seconds: int) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=drain_seconds, lifespan="off")
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)

    def serve_on(self, listener: socket.socket) -> None:
        # uvicorn raises the signal again once it has drained; by then there is nothing left to interrupt.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
