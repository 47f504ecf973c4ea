"""Many requests: a number of clients that each wait for their answer, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from dsv41_jax.load_test.client import Outcome
from dsv41_jax.load_test.workload import Planned, arrivals

Send = Callable[[Planned, float], Awaitable[Outcome]]
_BACK_OFF = 1.0  # seconds that a client waits after an error, unless the server says how long


@dataclasses.dataclass(frozen=True)
class Load:
    """How much at once: "closed", `value` clients; or "open", `value` requests a second.

    Attributes:
        requests: how many are sent. duration: seconds after which no more are. The first limit that is reached counts.
    """

    kind: Literal["closed", "open"]
    value: float
    requests: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration is None:
            raise ValueError("a number of requests or a duration is needed")

    def __str__(self) -> str:
        if self.kind == "open":
            return f"{self.value:g} requests/s"
        return f"{self.value:g} client{'' if self.value == 1 else 's'}"


@dataclasses.dataclass
class Measured:
    """What came of a load: seconds from the first request to the last answer, and every request's outcome."""

    load: Load
    seconds: float
    outcomes: list[Outcome]


async def run(
    load: Load, planned: Iterator[Planned], send: Send, seed: int = 0, done: Callable[[Outcome], None] = lambda _: None
) -> Measured:
    """Put a load on a server.

    Args:
        planned: requests, as many as are needed. send: sends one that is due at a `time.perf_counter()`.
        done: is told of each outcome as it comes.
    """
    start, outcomes = time.perf_counter(), []

    async def one(request: Planned, due: float) -> Outcome:
        outcome = await send(request, due)
        outcomes.append(outcome)
        done(outcome)
        return outcome

    await (_closed if load.kind == "closed" else _open)(load, planned, one, start, seed)
    return Measured(load, time.perf_counter() - start, outcomes)


async def _closed(load: Load, planned: Iterator[Planned], one: Send, start: float, seed: int) -> None:
    left = math.inf if load.requests is None else load.requests
    until = math.inf if load.duration is None else start + load.duration

    async def client() -> None:
        nonlocal left
        while left > 0 and time.perf_counter() < until:
            left -= 1
            outcome = await one(next(planned), time.perf_counter())
            if outcome.error and left > 0:  # a loop without a pause would only count refusals
                wait = _BACK_OFF if outcome.retry_after is None else outcome.retry_after
                await asyncio.sleep(min(wait, max(0.0, until - time.perf_counter())))

    async with asyncio.TaskGroup() as group:
        for _ in range(int(load.value)):
            group.create_task(client())


async def _open(load: Load, planned: Iterator[Planned], one: Send, start: float, seed: int) -> None:
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(arrivals(load.value, seed)):
            if number == load.requests or (load.duration is not None and at >= load.duration):
                break
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            group.create_task(one(next(planned), start + at))
