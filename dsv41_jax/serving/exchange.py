"""One HTTP exchange with the engine: a body in, requests to the engine, a response out, whole or as a stream.

Whatever happens first ends it: the answer, an error, or the client's going away, which cancels the requests at once.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dsv41_jax.serving.answers import Done
from dsv41_jax.serving.api_errors import ApiError, of_ended, of_exception
from dsv41_jax.serving.auth import tenant_of
from dsv41_jax.serving.limits import ClientGone, read_body
from dsv41_jax.serving.outbox import Behind, Outbox, Running
from dsv41_jax.serving.request import Engine, GenerationRequest, NotServing
from dsv41_jax.serving.settings import ServeSettings

_LOG = logging.getLogger(__name__)
_KEEP_ALIVE = b": still working\n\n"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do for one body.

    Attributes:
        requests: for the engine; their sinks put `Events` and at last a `Done` into the outbox.
        stream: whether the client wants events. tail: the last of them. response: the body where there is no stream.
        error_event: an error inside a stream.
    """

    requests: Sequence[GenerationRequest]
    stream: bool
    tail: Callable[[list[Done]], bytes]
    response: Callable[[list[Done]], dict[str, Any]]
    error_event: Callable[[ApiError], bytes]


class MakeJob(Protocol):
    """Reads a body of one API."""

    def __call__(self, data: bytes, tenant: str, outbox: Outbox) -> Awaitable[Job]:
        """Raises ValueError, TypeError, ConversionError or ApiError for what is wrong with the body."""


async def exchange(request: Request, engine: Engine, settings: ServeSettings, make_job: MakeJob) -> Any:
    """Serve one request: a response for Starlette to send.

    Raises:
        ApiError: to be sent as an error. ClientGone: there is nobody to send to.
    """
    if not engine.ready:
        raise of_exception(NotServing("the server is not ready: it starts, or it ends"))
    data = await read_body(request, settings)
    gone = asyncio.ensure_future(_gone(request.receive))
    streams = False
    try:
        outbox = Outbox()
        try:
            job = await _unless(gone, make_job(data, tenant_of(request.scope), outbox))
            engine.submit(job.requests)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            raise _client_fault(error) from error
        running = Running(engine, outbox, job.requests)
        if job.stream:
            streams = True
            return EventStream(_pieces(job, running, settings), running, gone)
        try:
            return JSONResponse(await _unless(gone, _whole(job, running, settings)))
        finally:
            running.cancel()
    finally:
        if not streams:
            gone.cancel()


def _client_fault(error: Exception) -> Exception:
    """The error that a client is told, or the error itself where it is the server's own."""
    try:
        return of_exception(error)
    except TypeError:
        return error


async def _gone(receive: Receive) -> None:
    """Until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Future, work: Awaitable[_T]) -> _T:
    """The result of some work; ClientGone as soon as the client is."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()


async def _whole(job: Job, running: Running, settings: ServeSettings) -> dict[str, Any]:
    """The response, when all requests have ended."""
    dones = []
    async for items in running.batches(settings.idle_seconds):
        for item in items:
            if isinstance(item, Done):
                running.ended(item.request_id)
                if error := of_ended(item.ended):
                    raise error
                dones.append(item)
    return job.response(dones)


async def _pieces(job: Job, running: Running, settings: ServeSettings) -> AsyncIterator[bytes]:
    """The events of a stream; an error is the last of them, and never a silent end."""
    dones: list[Done] = []
    try:
        async for items in running.batches(settings.idle_seconds):
            data = []
            for item in items:
                data.append(item.data)
                if isinstance(item, Done):
                    running.ended(item.request_id)
                    if error := of_ended(item.ended):
                        yield b"".join([*data, job.error_event(error)])
                        return
                    dones.append(item)
            yield b"".join(data) or (_KEEP_ALIVE if not items else b"")
        yield job.tail(dones)
    except Behind:
        yield job.error_event(ApiError(408, "the stream was not read fast enough", "slow"))
    except Exception:
        _LOG.exception("a stream broke")
        yield job.error_event(ApiError(500, "the server failed"))


class EventStream:
    """A response of events; the requests behind it are cancelled when it ends, however it ends."""

    _HEADERS = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # tells proxies not to collect pieces
    )

    def __init__(self, pieces: AsyncIterator[bytes], running: Running, gone: asyncio.Future):
        self._pieces, self._running, self._gone = pieces, running, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({pump, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            pump.cancel()
            self._gone.cancel()
            self._running.cancel()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(self._HEADERS)})
        async for piece in self._pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
