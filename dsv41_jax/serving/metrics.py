"""What `/metrics` says, in Prometheus' text form.

    from the engine's state, read once a scrape     queue, rows, pages, bytes, token counters, steps, compilations
    from what the engine tells its `Observer`       time to first token, time per output token, how requests ended
    from the APIs                                   requests that were rejected
    of the process                                  start time, memory, processor seconds (Linux)

Names begin with dsv41_, but for the process' own, which have the names that every Prometheus client gives them.
docs/serving.md lists them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dsv41_jax.serving.request import Ended, EndReason, Engine, EngineState

# Seconds. A first token waits for the queue and the whole prompt; a next one for a decode step, and for some prompts.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
NEXT_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60),
)
_ABORTED: tuple[EndReason, ...] = ("cancelled", "deadline", "failed")

# Fields of `EngineState`: name of the metric and what it is. Counters get "_total" in the text.
_GAUGES = {
    "waiting": ("queue_length", "Requests that wait for a row"),
    "reading": ("requests_reading", "Requests whose prompt is read"),
    "writing": ("requests_writing", "Requests that are written"),
    "rows": ("rows", "Requests that can run at once"),
    "pages": ("pages", "Pages of the cache, 128 tokens each"),
    "free_pages": ("pages_free", "Pages of the cache that no request has"),
    "hbm_bytes": ("hbm_bytes", "Bytes of weights and cache on this host's devices"),
    "persistent_bytes": ("persistent_bytes", "Bytes of prefixes kept off the devices"),
}
_COUNTERS = {
    "compilations": ("compilations_after_warmup", "Programs compiled after warm-up"),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts, those from kept pages included"),
    "cached_tokens": ("cached_tokens", "Tokens of prompts whose pages were kept from earlier requests"),
    "completion_tokens": ("completion_tokens", "Tokens of answers"),
    "preempted": ("preemptions", "Times that a request gave its pages back, to be read again later"),
    "steps": ("engine_steps", "Steps of the engine"),
}


class Metrics:
    """Metrics of one server, in a registry of its own. An `Observer` of the engine; every method from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", FIRST_TOKEN_BUCKETS
        )
        self._next_token = self._histogram(
            "time_per_output_token_seconds", "Between two tokens of a request", NEXT_TOKEN_BUCKETS
        )
        self._ended = self._counter("requests_ended", "Requests that left the engine", "reason")
        for reason in get_args(EndReason):  # there from the start: a rate needs the zero before the first
            self._ended.labels(reason)
        self._aborted = self._counter("requests_aborted", "Requests that ended by the client, a deadline or a failure")
        self._rejected = self._counter("requests_rejected", "Requests that never came into the engine", "reason")
        self._hits = self._counter("cache_hits", "Ended requests whose prompt began with kept pages")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"dsv41_{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dsv41_{name}", text, labels, registry=self._registry)

    def attach(self, engine: Engine) -> None:
        """Show this engine's state from now on.

        Raises:
            ValueError: an engine is shown already.
        """
        self._registry.register(_EngineCollector(engine))

    def first_token(self, seconds: float) -> None:
        """From submission to the first token."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Between two tokens of a request."""
        self._next_token.observe(seconds)

    def ended(self, ended: Ended) -> None:
        """A request has left the engine."""
        self._ended.labels(ended.reason).inc()
        if ended.reason in _ABORTED:
            self._aborted.inc()
        if ended.cached_tokens:
            self._hits.inc()

    def rejected(self, reason: str) -> None:
        """A request was turned away. `reason`: one of a few fixed words, never text of a client: each makes a series
        that stays.
        """
        self._rejected.labels(reason).inc()

    def render(self) -> tuple[bytes, str]:
        """The body of `/metrics` and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


@dataclasses.dataclass(frozen=True)
class _EngineCollector:
    """One look at the engine for each scrape, so that the numbers of a scrape belong together."""

    engine: Engine

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry's check that nobody has them yet; without it, it would collect once for that."""
        return self._metrics(EngineState(*(0 for _ in dataclasses.fields(EngineState))), False)

    def collect(self) -> Iterable[Metric]:
        return self._metrics(self.engine.state(), self.engine.ready)

    @staticmethod
    def _metrics(state: EngineState, ready: bool) -> Iterable[Metric]:
        yield GaugeMetricFamily("dsv41_ready", "1: warm and not draining", value=float(ready))
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"dsv41_{name}", text, value=getattr(state, field))
        used = state.pages - state.free_pages
        yield GaugeMetricFamily("dsv41_pages_used", "Pages of the cache that requests have", value=used)
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"dsv41_{name}", text, value=getattr(state, field))
