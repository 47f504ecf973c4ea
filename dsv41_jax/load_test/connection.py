"""HTTP/1.1 as far as a load generator needs it: one request on a new connection, and the answer's body as it comes.

A connection for each request, without pooling, so that what is timed is what a new client sees. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

_LINE = 1 << 20  # bytes; most of a line of an answer


class ProtocolError(Exception):
    """The other side does not speak HTTP/1.1 as it should, or stopped in the middle of an answer."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where requests go. `key`: sent as a bearer token, or None."""

    url: str
    key: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = self._parts
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {self.url!r}: needed is http://HOST:PORT or https://HOST:PORT")

    @property
    def _parts(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.url)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection; OSError where there is none."""
        parts = self._parts
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        return await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=_LINE)

    def head(self, method: str, path: str, length: int) -> bytes:
        """Request line and headers."""
        parts = self._parts
        lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        lines += ["Connection: close", "Content-Type: application/json", f"Content-Length: {length}"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join([*lines, "", ""]).encode()


class Answer:
    """An answer whose head has come.

    Attributes:
        status: e.g. 200. headers: names in lower case.
    """

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader):
        self.status, self.headers, self._reader = status, headers, reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, in the pieces in which it comes.

        Raises:
            ProtocolError: it ends before it is complete.
        """
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            return
        left = int(self.headers.get("content-length", -1))
        while left and (piece := await self._reader.read(_LINE if left < 0 else min(left, _LINE))):
            left -= len(piece) if left > 0 else 0
            yield piece
        if left > 0:
            raise ProtocolError(f"the answer ended {left} bytes too early")

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[str]:
        """Data of the server-sent events in the body, as they come."""
        pending, data = b"", []
        async for piece in self.pieces():
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                line = line.rstrip(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" ").decode())
                elif not line and data:
                    yield "\n".join(data)
                    data = []


@contextlib.asynccontextmanager
async def exchange(server: Server, method: str, path: str, payload: Any = None) -> AsyncIterator[Answer]:
    """Send a request on a new connection, and give its answer once the head is there.

    Raises:
        OSError: no connection. ProtocolError: no HTTP, or the connection broke in the middle; also while the body is
            read inside the `async with`.
    """
    body = b"" if payload is None else json.dumps(payload, separators=(",", ":")).encode()
    reader, writer = await server.connect()
    try:
        writer.write(server.head(method, path, len(body)) + body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, *_ = head[0].split(" ")
        if not version.startswith("HTTP/1."):
            raise ProtocolError(f"no HTTP/1.1 answer but {head[0]!r}")
        pairs = (line.partition(":") for line in head[1:] if line)
        yield Answer(int(status), {name.lower(): value.strip() for name, _, value in pairs}, reader)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise ProtocolError(f"the answer is broken off or is no HTTP: {error}") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
