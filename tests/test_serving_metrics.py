"""The text of `/metrics`: it parses, its numbers are the engine's, counters only grow, threads lose nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsv41_jax.serving import metrics as module
from dsv41_jax.serving.metrics import Metrics
from dsv41_jax.serving.request import Ended, EndReason, EngineState
from processes import ROOT

STATE = EngineState(
    waiting=3,
    reading=2,
    writing=5,
    rows=16,
    pages=1000,
    free_pages=640,
    hbm_bytes=123_456_789,
    persistent_bytes=4096,
    compilations=1,
    prompt_tokens=9000,
    cached_tokens=1280,
    completion_tokens=700,
    preempted=4,
    steps=5000,
)
FROM_STATE = {
    "dsv41_queue_length": 3,
    "dsv41_requests_reading": 2,
    "dsv41_requests_writing": 5,
    "dsv41_rows": 16,
    "dsv41_pages": 1000,
    "dsv41_pages_free": 640,
    "dsv41_pages_used": 360,
    "dsv41_hbm_bytes": 123_456_789,
    "dsv41_persistent_bytes": 4096,
    "dsv41_compilations_after_warmup_total": 1,
    "dsv41_prompt_tokens_total": 9000,
    "dsv41_cached_tokens_total": 1280,
    "dsv41_completion_tokens_total": 700,
    "dsv41_preemptions_total": 4,
    "dsv41_engine_steps_total": 5000,
    "dsv41_ready": 1,
}


class FakeEngine:
    """Counts how often it is looked at."""

    def __init__(self, state: EngineState = STATE):
        self.now, self.looks, self.ready = state, 0, True

    def state(self) -> EngineState:
        self.looks += 1
        return self.now


def scrape(metrics: Metrics) -> dict[str, float]:
    """Samples by name and labels, as a Prometheus server reads them."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.type != "unknown" and family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def test_the_engine_is_looked_at_once_a_scrape():
    metrics, engine = Metrics(), FakeEngine()
    assert "dsv41_rows" not in scrape(metrics)
    metrics.attach(engine)
    assert engine.looks == 0
    found = scrape(metrics)
    assert engine.looks == 1
    assert {name: found[name] for name in FROM_STATE} == FROM_STATE
    engine.ready = False
    engine.now = dataclasses.replace(STATE, waiting=0, free_pages=1000, steps=5001)
    found = scrape(metrics)
    assert found["dsv41_queue_length"] == found["dsv41_pages_used"] == found["dsv41_ready"] == 0
    assert found["dsv41_engine_steps_total"] == 5001
    with pytest.raises(ValueError, match="dsv41_"):
        metrics.attach(FakeEngine())


def test_times_go_into_buckets():
    metrics = Metrics()
    for seconds in (0.004, 0.03, 0.2, 700):
        metrics.first_token(seconds)
    metrics.next_token(0.012)
    found = scrape(metrics)
    first = "dsv41_time_to_first_token_seconds"
    assert found[f"{first}_count"] == 4 and found[f"{first}_sum"] == pytest.approx(700.234)
    below = [found[f"{first}_bucket{{le={edge}}}"] for edge in ("0.01", "0.025", "0.05", "0.25", "600.0", "+Inf")]
    assert below == [1, 1, 2, 3, 3, 4]
    assert found["dsv41_time_per_output_token_seconds_bucket{le=0.015}"] == 1
    assert found["dsv41_time_per_output_token_seconds_bucket{le=0.01}"] == 0
    for buckets in (module.FIRST_TOKEN_BUCKETS, module.NEXT_TOKEN_BUCKETS):
        assert sorted(set(buckets)) == list(buckets) and buckets[0] <= 0.01 and buckets[-1] >= 60


def test_how_requests_end_is_counted():
    metrics = Metrics()
    before = scrape(metrics)
    reasons = [f"dsv41_requests_ended_total{{reason={reason}}}" for reason in get_args(EndReason)]
    assert [before[name] for name in reasons] == [0] * 5
    for reason, cached in (("stop", 256), ("length", 0), ("cancelled", 128), ("deadline", 0), ("failed", 0)):
        metrics.ended(Ended(reason, 300, 10, cached))
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    metrics.rejected("not_serving")
    after = scrape(metrics)
    assert [after[name] for name in reasons] == [1] * 5
    assert after["dsv41_requests_aborted_total"] == 3 and after["dsv41_cache_hits_total"] == 2
    assert after["dsv41_requests_rejected_total{reason=queue_full}"] == 2
    assert after["dsv41_requests_rejected_total{reason=not_serving}"] == 1
    assert all(after[name] >= value for name, value in before.items() if "_total" in name)
    assert 0 < after["process_start_time_seconds"] <= time.time()


def test_servers_do_not_share_numbers():
    one, other = Metrics(), Metrics()
    one.ended(Ended("failed", 1, 0))
    assert scrape(other)["dsv41_requests_aborted_total"] == 0


def test_threads_lose_nothing_and_scrapes_only_grow():
    metrics, engine, done = Metrics(), FakeEngine(), threading.Event()
    metrics.attach(engine)

    def work(_: int) -> None:
        for _ in range(500):
            metrics.next_token(0.01)
            metrics.ended(Ended("stop", 1, 1))

    seen = []

    def watch() -> None:
        while not done.is_set():
            seen.append(scrape(metrics))

    with ThreadPoolExecutor(5) as pool:
        watcher = pool.submit(watch)
        list(pool.map(work, range(4)))
        done.set()
        watcher.result()
    seen.append(scrape(metrics))
    assert seen[-1]["dsv41_time_per_output_token_seconds_count"] == 2000
    assert seen[-1]["dsv41_requests_ended_total{reason=stop}"] == 2000
    for name in seen[-1]:
        if name.endswith(("_total", "_count", "_sum")) or "_bucket" in name:
            values = [each[name] for each in seen]
            assert values == sorted(values), name


def test_every_name_is_in_the_docs():
    metrics = Metrics()
    metrics.attach(FakeEngine())
    text = (ROOT / "docs/serving.md").read_text()
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        if family.name.startswith("dsv41_") and not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            assert f"`{name}`" in text, f"docs/serving.md does not name {name}"
