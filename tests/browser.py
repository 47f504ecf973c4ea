"""Headless Chromium for tests of the page, and a scripted server behind it."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = Path(__file__).parents[1] / "dsv41_jax" / "serving" / "page"
CSP = "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Skips where there is none, but not under CI=true, where one has to be."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if executable is None or sync_playwright is None:
        missing = "there is no Chromium (Debian's package chromium)" if executable is None else "no package playwright"
        if os.environ.get("CI") == "true":
            pytest.fail(f"the page cannot be tested: {missing}")
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


class ScriptedServer:
    """Serves the page, and answers chats with events that the test hands out.

    Attributes:
        requests: bodies of the chats. headers: theirs. disconnected: set when a client went away during an answer.
        state: what /state says; `state_reads` counts the questions. model: of /v1/models.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.disconnected = threading.Event()
        self.model = {"id": "demo-model", "object": "model", "images": True}
        self.state_reads = 0
        self.state = {
            "waiting": 1, "reading": 1, "writing": 2, "rows": 16, "pages": 512, "free_pages": 384,
            "hbm_bytes": 1610612736, "persistent_bytes": 52428800, "compilations": 0, "prompt_tokens": 5000,
            "cached_tokens": 1234, "completion_tokens": 0, "preempted": 0, "steps": 1,
        }  # fmt: skip
        self._answers: list[bytes | Response | None] = []
        self._more = threading.Condition()

    def say(self, *chunks: dict[str, Any] | str) -> None:
        """More of the answer that is asked for now or next: chunks of a completion, or a delta's content."""
        events = [chunk if isinstance(chunk, dict) else delta(content=chunk) for chunk in chunks]
        self._put("".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in events).encode())

    def end(self, reason: str = "stop", usage: dict[str, Any] | None = None) -> None:
        """The end of the answer, in the API's form."""
        self.say({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if usage is not None:
            self.say({"choices": [], "usage": usage})
        self._put(b": a comment\n\ndata: [DONE]\n\n")
        self.cut()

    def cut(self) -> None:
        """The end of the connection."""
        self._put(None)

    def refuse(self, response: Response) -> None:
        """Answer the next chat with this."""
        self._put(response)

    def _put(self, answer: bytes | Response | None) -> None:
        with self._more:
            self._answers.append(answer)
            self._more.notify_all()

    async def _next(self) -> bytes | Response | None:
        while not self._answers:
            await asyncio.sleep(0.005)
        return self._answers.pop(0)

    async def _stream(self, answer: bytes | None) -> AsyncIterator[bytes]:
        """Pieces cut at places that mean nothing, inside of characters too."""
        try:
            size = 0
            while answer is not None:
                while answer:
                    size = size % 7 + 1
                    yield answer[:size]
                    answer = answer[size:]
                    # Long enough where a character is cut that its parts arrive apart.
                    await asyncio.sleep(0.02 if answer[:1] and 0x80 <= answer[0] < 0xC0 else 0)
                answer = await self._next()
        except asyncio.CancelledError:
            self.disconnected.set()
            raise

    async def _chat(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = await self._next()
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._stream(answer), media_type="text/event-stream")

    async def _state(self, request: Request) -> Response:
        self.state_reads += 1
        self.state["completion_tokens"] += 50
        return JSONResponse(self.state)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model]})

    async def _file(self, request: Request) -> Response:
        return FileResponse(
            PAGE / request.path_params.get("file", "index.html"), headers={"Content-Security-Policy": CSP}
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """The server's address."""
        routes = [
            Route("/", self._file),
            Route("/page/{file}", self._file),
            Route("/state", self._state),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + 10
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(10)
            listener.close()


def delta(**fields: Any) -> dict[str, Any]:
    """A chunk of a chat completion."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}
