"""A server for load generators, of a few lines: its answers are scripted, and what it was asked is kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

READY = {"status": "ready"}


@dataclasses.dataclass
class ScriptedServer:
    """Streams `tokens` events (None: as many as asked for), `first` seconds after the request and `each` apart.

    Attributes:
        asked: bodies of the completions that came in. together: most requests at one time.
        fail_every: every so-manieth completion is refused with 429; 0 for none. broken: streams break off: "cut" in
            the middle of a chunk, "finish" before the finish, "event" by an error event; None for none.
        key: what clients must have. ready: what /ready says.
    """

    first: float = 0.02
    each: float = 0.004
    tokens: int | None = None
    fail_every: int = 0
    broken: str | None = None
    key: str | None = None
    ready: tuple[int, Any] = (200, READY)
    url: str = ""
    asked: list[dict] = dataclasses.field(default_factory=list)
    running: int = 0
    together: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            length = re.search(r"^content-length: (\d+)", head.lower(), re.M)
            body = json.loads(await reader.readexactly(int(length[1]) if length else 0) or "null")
            if path == "/ready":
                self._answer(writer, *self.ready)
            elif self.key and f"Authorization: Bearer {self.key}\r\n" not in head:
                self._answer(writer, 401, {"error": {"message": "no"}})
            elif path == "/v1/models":
                self._answer(writer, 200, {"data": [{"id": "scripted"}]})
            elif path == "/tokenize":
                self._answer(writer, 200, {"tokens": sorted({ord(letter) for letter in body["prompt"]})})
            elif (method, path) == ("POST", "/v1/completions"):
                self.running += 1
                self.together = max(self.together, self.running)
                try:
                    await self._complete(writer, body)
                finally:
                    self.running -= 1
            else:
                self._answer(writer, 404, {"error": {"message": path}})
            await writer.drain()
        writer.close()

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, body: Any, more: str = "") -> None:
        raw = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(raw)}\r\n{more}\r\n".encode() + raw)

    async def _complete(self, writer: asyncio.StreamWriter, body: dict) -> None:
        self.asked.append(body)
        if self.fail_every and len(self.asked) % self.fail_every == 0:
            self._answer(writer, 429, {"error": {"message": "full"}}, "Retry-After: 0\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = body["max_tokens"] if self.tokens is None else min(self.tokens, body["max_tokens"])
        await asyncio.sleep(self.first)
        for number in range(count):
            if self.broken == "cut" and number == 1:
                writer.write(b"ff\r\ndata: {")
                return
            if self.broken == "event" and number == 1:
                await self._event(writer, {"error": {"message": "the engine broke"}})
                writer.write(b"0\r\n\r\n")
                return
            last = number == count - 1 and self.broken != "finish"
            finish = ("length" if count == body["max_tokens"] else "stop") if last else None
            await self._event(writer, {"choices": [{"text": "a", "finish_reason": finish}], "usage": None})
            await asyncio.sleep(self.each)
        prompt = len(body["prompt"])
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
        await self._event(writer, {"choices": [], "usage": usage})
        await self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    async def _event(writer: asyncio.StreamWriter, data: Any) -> None:
        """One event, in two chunks that cut a line."""
        raw = f"data: {data if isinstance(data, str) else json.dumps(data)}\r\n\r\n".encode()
        for part in (raw[:9], raw[9:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()


@contextlib.contextmanager
def scripted(**options: Any) -> Iterator[ScriptedServer]:
    """A running one, on a free port of the loopback, in a thread of its own."""
    server, started = ScriptedServer(**options), threading.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        server.loop, server.end = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        async with listening:
            await server.end.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait(10)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.end.set)
        thread.join(10)
