"""From the engine's thread to the event loop: what the sinks of one HTTP request put out, and its end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dsv41_jax.serving.request import Engine, GenerationRequest

MOST_BEHIND = 4096
KEEP_ALIVE_SECONDS = 10.0


class Behind(Exception):
    """The client takes what is written for it too slowly."""


class Outbox:
    """A queue with many writers in any thread and one reader in an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        """From any thread; returns at once."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop has ended: nobody reads
                pass

    async def take(self, seconds: float) -> list[Any]:
        """All that is there, at least one; nothing if none comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return []
        self._wake.clear()
        with self._lock:
            items, self._items = self._items, []
        return items


class Running:
    """The requests to the engine that belong to one HTTP request."""

    def __init__(self, engine: Engine, outbox: Outbox, requests: Sequence[GenerationRequest]):
        self._engine, self._outbox = engine, outbox
        self._left = {request.request_id for request in requests}

    def ended(self, request_id: str) -> None:
        """One has left the engine."""
        self._left.discard(request_id)

    def cancel(self) -> None:
        """End those that are still there."""
        left, self._left = self._left, set()
        for request_id in left:
            self._engine.cancel(request_id)

    async def batches(self, idle_seconds: float) -> AsyncIterator[list[Any]]:
        """What was put out, until all have ended; an empty list where it is time to show that the server lives.

        Raises:
            Behind: the reader had more than `MOST_BEHIND` pieces to catch up with for `idle_seconds`.
        """
        behind_since = None
        while self._left:
            items = await self._outbox.take(KEEP_ALIVE_SECONDS)
            now = time.monotonic()
            behind_since = (behind_since or now) if len(items) > MOST_BEHIND else None
            if behind_since is not None and now - behind_since > idle_seconds:
                raise Behind
            yield items
