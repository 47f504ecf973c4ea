"""What a client may take: the size of its body, and how slowly it may send and read."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv41_jax.serving.api_errors import ApiError, error_response
from dsv41_jax.serving.settings import ServeSettings

_HEADER_BYTES = 64 << 10
_LINGER_SECONDS = 2.0


async def read_body(request: Request, settings: ServeSettings) -> bytes:
    """The body of a request.

    Raises:
        ApiError: 413 above `max_body_bytes`, as soon as that is known; 408 after a silence of `idle_seconds`, or
            `request_seconds` in all; 415 for anything that does not say it is JSON (a web page can send such bodies to
            any server unasked).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type is {kind!r}: application/json is needed")
    most, parts, size = settings.max_body_bytes, [], 0
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body is larger than {most} bytes", headers={"Connection": "close"})
    if length.isdigit() and int(length[:20]) > most:
        raise too_large
    until = asyncio.get_running_loop().time() + settings.request_seconds
    while True:
        try:
            left = until - asyncio.get_running_loop().time()
            async with asyncio.timeout(min(settings.idle_seconds, left)):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, "the body did not come", headers={"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


class ClientGone(Exception):
    """The client has closed the connection: nobody reads an answer."""


class Refusal:
    """An error response to a body that was not read to its end.

    A server that closes while the client still sends makes it lose the response: after it, what comes is dropped for a
    moment, until the client has read it.
    """

    def __init__(self, path: str, error: ApiError):
        self._response = error_response(path, error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self._response.status_code, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._response.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})

    @property
    def _headers(self) -> list[tuple[bytes, bytes]]:
        return self._response.raw_headers


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, which waits for ever, with time limits: for the first byte and the headers of a request,
    and for a client that does not read what is sent to it.
    """

    idle_seconds = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()
        else:
            self._reading = _stopped(self._reading)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.idle_seconds, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _stopped(self._writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading, self._writing = _stopped(self._reading), _stopped(self._writing)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # but not before all is read
            self._writing = self._writing or self.loop.call_later(self.idle_seconds, self._give_up)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # `close` would wait for it to be read
            self._give_up()
        super().timeout_keep_alive_handler()

    def _expect_request(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.idle_seconds, self._give_up)

    def _give_up(self) -> None:
        self.transport.abort()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def uvicorn_options(settings: ServeSettings) -> dict[str, Any]:
    """What `uvicorn.Config` needs for a server of these settings, besides the application."""
    protocol = type("TimedProtocol", (TimedProtocol,), {"idle_seconds": settings.idle_seconds})
    return {
        "http": protocol,
        "ws": "none",
        "lifespan": "off",
        "h11_max_incomplete_event_size": _HEADER_BYTES,
        "timeout_keep_alive": max(1, int(settings.idle_seconds)),
        "server_header": False,
        "proxy_headers": False,
        "access_log": False,
        "log_config": None,
    }
