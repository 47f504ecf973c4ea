"""What the APIs give the engine, and what comes back."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from dsv41_jax.completion import GeneratedToken
from dsv41_jax.image_input import ImageInput
from dsv41_jax.sampling import SamplingOptions

# "cancelled": by the client, or by the end of the server, as the message says. "deadline": it ran out of time.
# "failed": the engine broke; the message says how.
EndReason = Literal["stop", "length", "cancelled", "deadline", "failed"]


class RequestError(ValueError):
    """A request that can never run here: the client's fault (400)."""


class QueueFull(RuntimeError):
    """Too many requests wait (429). `retry_after`: seconds after which it is worth another try."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class NotServing(RuntimeError):
    """The engine is not warm yet, drains, or has ended (503)."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a request ended.

    Attributes:
        completion_tokens: tokens given to the sink. cached_tokens: tokens of the prompt whose pages were kept from
            earlier requests. message: for "failed" and "deadline", what happened.
    """

    reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    message: str = ""


class Sink(Protocol):
    """Where a request's tokens go. Called in the engine's thread, in order, and must return at once."""

    def token(self, token: GeneratedToken) -> bool:
        """One more token (its `row` means nothing here). True ends the request, e.g. after a stop string: reason
        "stop".
        """

    def done(self, ended: Ended) -> None:
        """The request has left the engine; called exactly once, and last."""


class Constraint(Protocol):
    """What a request's next token may be. Called in the engine's thread; has its own state, one a request."""

    def fill(self, mask: np.ndarray) -> bool:
        """Write which ids may come next: bit i % 32 of mask[i // 32] (int32 [ceil(V / 32)]) is id i. False: any may,
        and the mask was left alone. A text that may end here allows the end-of-sequence id.
        """

    def advance(self, token_id: int) -> None:
        """This token was chosen."""


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One text to write.

    Attributes:
        request_id: unique among those in the engine.
        token_ids: int32 [n], the prompt with image spans expanded. images: those of the prompt.
        sampling: how tokens are chosen; its seed is the request's own (the API draws one where the client gives none).
        stream: number of the random stream; sample i of a request with n > 1 has i << 16, as in `Model.generate`.
        stop_ids: ids that end the text, the end-of-sequence id among them; they are not given to the sink.
        logprobs: how many likeliest tokens to report beside each; None for no log probabilities.
        batch_invariant: the text does not depend on what else runs, not even where it had to make room and begin again
            (its tokens are then read back one by one, as they were written).
        priority: smaller runs first. tenant: requests of different tenants take turns at equal priority.
        deadline: `time.monotonic()` at which it ends unfinished, or None.
    """

    request_id: str
    token_ids: np.ndarray
    sampling: SamplingOptions
    max_new_tokens: int
    stop_ids: frozenset[int]
    sink: Sink
    images: tuple[ImageInput, ...] = ()
    stream: int = 0
    logprobs: int | None = None
    constraint: Constraint | None = None
    batch_invariant: bool = True
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None


@dataclasses.dataclass(frozen=True)
class EngineState:
    """A look at the engine: gauges, and counters since its start.

    Attributes:
        waiting, reading, writing: requests in the queue, whose prompt is read, and that are written.
        rows, pages, free_pages: places for requests that run, and pages of the cache.
        hbm_bytes: of weights and cache on this host's devices. persistent_bytes: of prefixes kept off the devices.
        compilations: programs compiled after warm-up.
        prompt_tokens, cached_tokens, completion_tokens, preempted, steps: counters.
    """

    waiting: int
    reading: int
    writing: int
    rows: int
    pages: int
    free_pages: int
    hbm_bytes: int
    persistent_bytes: int
    compilations: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preempted: int
    steps: int


class Engine(Protocol):
    """What the APIs need of the engine. Every method can be called from any thread."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, all or none.

        Raises:
            RequestError: one can never run here. QueueFull, NotServing: not now.
        """

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is, at once; nothing happens to one that has ended already."""

    def state(self) -> EngineState:
        """What is going on."""

    @property
    def ready(self) -> bool:
        """Warm, and not draining."""


class Observer(Protocol):
    """What the engine tells metrics. Called in its thread."""

    def first_token(self, seconds: float) -> None:
        """From submission to the first token."""

    def next_token(self, seconds: float) -> None:
        """Between two tokens of a request."""

    def ended(self, ended: Ended) -> None:
        """A request has left the engine."""
