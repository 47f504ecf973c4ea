"""The engine: a thread that runs the loop, and what other threads may ask of it."""

import collections
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dsv41_jax.cache import pages_for
from dsv41_jax.serving.compiled import programs_asked_for
from dsv41_jax.serving.loop import Loop
from dsv41_jax.serving.request import (
    EndReason,
    EngineState,
    GenerationRequest,
    NotServing,
    QueueFull,
    RequestError,
)
from dsv41_jax.serving.task import Task

_log = logging.getLogger(__name__)
_LONGEST_WAIT = 60  # seconds that a refused client is told to wait at most


class ServingEngine:
    """Runs requests until it is stopped. The methods of `request.Engine`, and its life.

    Args:
        loop: what does the work, warm; nothing else may call it once the engine has started.
        max_queued: requests that may wait besides those that find a free row.
        failed: called in the engine's thread when it broke; every request has ended by then.
    """

    def __init__(self, loop: Loop, max_queued: int, failed: Callable[[BaseException], None] | None = None):
        self._loop, self._max_queued, self._on_failure = loop, max_queued, failed
        self._changed = threading.Condition()
        self._inbox: collections.deque[Task] = collections.deque()
        self._cancelled: set[str] = set()
        self._known: dict[str, Task] = {}
        self._numbers = itertools.count()
        self._open = self._stopping = False
        self._stop_message = ""
        self._compiled_before = programs_asked_for()
        self._seconds = 1.0  # that a request takes, of the last ones
        self._bytes = _device_bytes((loop.executor.runner.params, loop.executor.arrays))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        loop.ended = self._forget

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take requests from now on."""
        self._open = True
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Warm, and not draining."""
        return self._open

    def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait until those it has are done. False: some are not, after so many seconds."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._known or not self._thread.is_alive(), seconds)

    def stop(self, message: str = "the server ends") -> None:
        """End what is left, with that message, and the thread."""
        with self._changed:
            self._open, self._stopping, self._stop_message = False, True, message
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # --- from any thread ---------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, all or none; see `request.Engine`."""
        for request in requests:
            self._check(request)
        with self._changed:
            if not self._open:
                raise NotServing("the server is starting or ending")
            ids = [request.request_id for request in requests]
            if len(set(ids)) < len(ids) or any(name in self._known for name in ids):
                raise RequestError(f"request ids {ids}: each must be new")
            room = self._max_queued + self._loop.executor.size.rows
            if len(requests) > room:
                raise RequestError(f"{len(requests)} texts are asked for at once, and no more than {room} can be here")
            if len(self._known) + len(requests) > room:
                rounds = (len(self._known) + len(requests) - room) / self._loop.executor.size.rows
                seconds = min(max(1, math.ceil(rounds * self._seconds)), _LONGEST_WAIT)
                raise QueueFull(f"{len(self._known)} requests run or wait, and no more than {room} may", seconds)
            now = time.monotonic()
            for request in requests:
                task = Task(request, next(self._numbers), now)
                self._known[request.request_id] = task
                self._inbox.append(task)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is; nothing happens to one that has ended already."""
        with self._changed:
            if request_id in self._known:
                self._cancelled.add(request_id)
                self._changed.notify_all()

    def state(self) -> EngineState:
        """What is going on."""
        loop, counters = self._loop, self._loop.counters
        with self._changed:
            known, rows = len(self._known), list(loop.scheduler.rows.values())
        reading = sum(task.is_reading for task in rows)
        size = loop.executor.size
        return EngineState(
            waiting=max(known - len(rows), 0),
            reading=reading,
            writing=len(rows) - reading,
            rows=size.rows,
            pages=size.pages * size.shards,
            free_pages=loop.scheduler.pool.all_free,
            hbm_bytes=self._bytes,
            persistent_bytes=0,
            compilations=programs_asked_for() - self._compiled_before,
            **dataclasses.asdict(counters),
        )

    def _check(self, request: GenerationRequest) -> None:
        size, vocab = self._loop.executor.size, self._loop.config.vocab_size
        ids = request.token_ids
        if len(ids) == 0:
            raise RequestError("the prompt is empty")
        if ids.min() < 0 or ids.max() >= vocab:
            raise RequestError(f"the prompt has token ids outside of 0..{vocab - 1}")
        if request.max_new_tokens < 1:
            raise RequestError(f"max_tokens={request.max_new_tokens}: at least 1 is needed")
        total = len(ids) + request.max_new_tokens
        if total > size.max_len:
            raise RequestError(
                f"a prompt of {len(ids)} tokens and an answer of up to {request.max_new_tokens} exceed the "
                f"{size.max_len} tokens that a request can have here"
            )
        pages = pages_for(total)
        if pages > size.pages:
            raise RequestError(f"a request of {total} tokens takes {pages} pages, and there are {size.pages}")

    # --- its own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._loop.round()
        except BaseException as error:
            _log.exception("the engine broke")
            self._end_all("failed", f"the engine broke: {type(error).__name__}: {error}")
            if self._on_failure is not None:
                self._on_failure(error)
            return
        self._end_all("cancelled", self._stop_message)

    def _take_orders(self) -> bool:
        """New requests, cancellations and deadlines; waits while there is nothing to do. False: stop."""
        scheduler = self._loop.scheduler
        with self._changed:
            while not (self._inbox or self._cancelled or self._stopping or scheduler.rows or scheduler.waiting):
                self._changed.wait()
            if self._stopping:
                return False
            new, cancelled = list(self._inbox), self._cancelled
            self._inbox.clear()
            self._cancelled = set()
        for task in new:
            scheduler.add(task)
        for name in cancelled:
            self._loop.end(self._known[name], "cancelled")
        now = time.monotonic()
        for task in self._loop.tasks():
            deadline = task.request.deadline
            if deadline is not None and now >= deadline:
                took = now - task.submitted
                self._loop.end(task, "deadline", f"not finished after {took:.1f} s, which is its time limit")
        return True

    def _forget(self, task: Task) -> None:
        """A task has ended."""
        with self._changed:
            del self._known[task.id]
            self._cancelled.discard(task.id)
            self._seconds += 0.1 * (time.monotonic() - task.submitted - self._seconds)
            self._changed.notify_all()

    def _end_all(self, reason: EndReason, message: str) -> None:
        with self._changed:
            self._open = False
            left = [*self._inbox]
            self._inbox.clear()
        for task in left:
            self._loop.scheduler.add(task)
        for task in self._loop.tasks():
            self._loop.end(task, reason, message)


def _device_bytes(tree: object) -> int:
    """Bytes on this host's devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    parts = (shard.data for leaf in leaves for shard in leaf.addressable_shards)
    return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in parts)
