"""The engine's decisions, on an executor without a model and a clock that only steps move."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.serving.engine import ServingEngine
from dsv41_jax.serving.executor import CacheSize
from dsv41_jax.serving.loop import Loop
from dsv41_jax.serving.request import Ended, GenerationRequest, NotServing, QueueFull, RequestError
from dsv41_jax.serving.scheduler import Scheduler
from dsv41_jax.serving.steps import Block, EmbedImage, SetRows, from_bytes, to_bytes
from dsv41_jax.serving.task import Task
from fake_executor import SECONDS, VOCAB, Clock, FakeExecutor

EOS = 63


class Sink:
    """Notes what comes, and when."""

    def __init__(self, clock=time.monotonic, stop_after: int | None = None):
        self.clock, self.stop_after = clock, stop_after
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.logprobs: list = []
        self.ended: Ended | None = None
        self.over = threading.Event()

    def token(self, token) -> bool:
        assert self.ended is None
        self.tokens.append(token.token_id)
        self.times.append(self.clock())
        self.logprobs.append(token.logprob)
        return len(self.tokens) == self.stop_after

    def done(self, ended: Ended) -> None:
        assert self.ended is None, "done twice"
        self.ended = ended
        self.over.set()


class Server:
    """A loop on a fake executor, driven by hand."""

    def __init__(self, rows: int = 4, max_len: int = 1024, pages: int = 32, reserve: int = 8, stall: float = 0.1):
        self.clock = Clock()
        self.executor = FakeExecutor(CacheSize(rows, max_len, pages), self.clock)
        self.scheduler = Scheduler(self.executor.size, reserve)
        self.loop = Loop(self.executor, self.scheduler, None, stall, clock=self.clock)
        self.count = 0

    def ask(self, n: int = 5, most: int = 6, stop_after: int | None = None, **more) -> Task:
        self.count += 1
        prompt = np.arange(self.count, self.count + n, dtype=np.int32) % 50
        request = GenerationRequest(
            **{
                "request_id": str(self.count),
                "token_ids": prompt,
                "sampling": SamplingOptions(temperature=0),
                "max_new_tokens": most,
                "stop_ids": frozenset([EOS]),
                "sink": Sink(self.clock, stop_after),
            }
            | more
        )
        task = Task(request, self.count, self.clock())
        self.scheduler.add(task)
        return task

    def run(self, rounds: int = 10_000) -> None:
        for _ in range(rounds):
            if not self.loop.tasks():
                return
            self.loop.round()
        if rounds == 10_000:
            raise AssertionError("requests never end")

    def check_empty(self) -> None:
        assert not self.scheduler.rows and not self.scheduler.waiting
        assert self.scheduler.pool.all_free == self.executor.size.pages


def expected(task: Task) -> list[int]:
    first = (int(task.request.token_ids[-1]) + 1) % 60
    return [(first + i) % 60 for i in range(task.request.max_new_tokens)]


def test_texts_of_a_ragged_crowd():
    server = Server(rows=3)
    tasks = [server.ask(n, most) for n, most in [(1, 3), (40, 20), (9, 1), (8, 30), (100, 2), (17, 17)]]
    server.run()
    for task in tasks:
        assert task.request.sink.tokens == expected(task)
        ended = task.request.sink.ended
        assert (ended.reason, ended.prompt_tokens) == ("length", task.prompt_length)
        assert ended.completion_tokens == task.request.max_new_tokens
    server.check_empty()


def test_stop_tokens_are_not_given_and_sinks_can_stop():
    server = Server()
    stopped = server.ask(stop_ids=frozenset([7, 8]))
    assert expected(stopped)[:3] == [6, 7, 8]
    by_sink = server.ask(stop_after=2)
    server.run()
    assert stopped.request.sink.tokens == [6] and stopped.request.sink.ended.reason == "stop"
    assert by_sink.request.sink.tokens == expected(by_sink)[:2] and by_sink.request.sink.ended.reason == "stop"
    server.check_empty()


@pytest.mark.parametrize("stall", [0.05, 0.1, 0.3])
def test_a_long_prompt_delays_texts_by_the_budget_and_no_more(stall):
    server = Server(rows=9 + 3, stall=stall)  # 12 rows, three tiles
    writers = [server.ask(5, 100) for _ in range(8)]
    server.run(30)
    begin = server.clock()
    server.ask(900, 4)
    server.run()
    decode = 2 * SECONDS["decode"]  # two tiles hold the eight rows
    gaps = [np.diff([t for t in w.request.sink.times if t >= begin]).max() for w in writers]
    longest = max(stall, SECONDS["all"])  # one block at least
    assert max(gaps) <= decode + SECONDS["decode"] + longest + 1e-9
    assert max(gaps) >= decode + min(SECONDS["encoder"], longest)  # it did delay them


def test_prompts_take_turns():
    """A short prompt passes a long one, and any number of short ones leave the long one every other block."""
    server = Server()
    long = server.ask(900, 1)
    server.run(2)
    short = server.ask(20, 1)
    server.run(6)
    assert short.request.sink.ended is not None and long.is_reading
    rounds = 0
    while long.request.sink.ended is None:
        if len(server.loop.tasks()) < 4:
            server.ask(20, 1)
        server.loop.round()
        rounds += 1
    assert rounds <= 2 * (900 // 16 + 3)
    server.run()


def test_a_better_priority_is_read_first_and_nobody_waits_for_ever():
    server = Server(rows=4)
    slow = server.ask(300, 1, priority=1)
    rounds = 0
    while slow.request.sink.ended is None:
        while len(server.loop.tasks()) < 4:
            server.ask(100, 1)
        server.loop.round()
        rounds += 1
    assert 2 * (300 // 16) < rounds <= 4 * (300 // 16 + 3)
    server.run()


def test_requests_wait_for_pages_and_nobody_passes_the_first():
    server = Server(rows=4, pages=8, reserve=128)
    first = server.ask(128 * 5, 128)  # 6 pages
    second = server.ask(128 * 3, 128)  # 4: must wait
    third = server.ask(5, 2)  # 1: would fit, and waits behind
    server.loop.round()
    assert first.row is not None and second.row is None and third.row is None
    server.run()
    assert second.request.sink.times[0] > first.request.sink.times[-1]
    server.check_empty()


def test_pages_run_out_and_everybody_is_served():
    server = Server(rows=4, pages=8, reserve=1)
    tasks = [server.ask(100, 400, batch_invariant=i % 2 == 0) for i in range(4)]  # 4 pages each, 16 in all
    server.run()
    assert server.loop.counters.preempted > 0
    for task in tasks:
        assert task.request.sink.tokens == expected(task)
        assert task.request.sink.ended.completion_tokens == 400
    assert server.loop.counters.prompt_tokens == 400  # each counted once
    server.check_empty()


def test_the_oldest_is_never_put_back():
    server = Server(rows=4, pages=8, reserve=1)
    oldest = server.ask(100, 700)
    others = [server.ask(100, 400) for _ in range(3)]
    server.run(3)
    row = oldest.row
    while oldest.request.sink.ended is None:
        assert oldest.row == row
        server.loop.round()
    server.run()
    assert all(task.request.sink.tokens == expected(task) for task in others)


def test_priorities_and_tenants():
    server = Server(rows=1)
    greedy = [server.ask(10, 5, tenant="a") for _ in range(4)]
    modest = server.ask(10, 5, tenant="b")
    urgent = server.ask(10, 5, tenant="a", priority=-1)
    server.run()
    order = sorted([*greedy, modest, urgent], key=lambda t: t.request.sink.times[0])
    assert order[0] is urgent  # none ran yet
    assert order.index(modest) == 2  # after the first of tenant a, before its second
    assert [t for t in order if t in greedy] == greedy


@settings(max_examples=40)
@given(st.data())
def test_cancelled_anywhere(data):
    """Any request can go at any time; the others' texts are the same, and nothing is left behind."""
    server = Server(rows=3, pages=10, reserve=4)
    tasks = [server.ask(data.draw(st.integers(1, 300)), data.draw(st.integers(1, 60))) for _ in range(6)]
    cancelled = data.draw(st.lists(st.sampled_from(tasks), unique=True, max_size=4))
    for task in cancelled:
        server.run(data.draw(st.integers(0, 25)))
        if task in server.loop.tasks():
            server.loop.end(task, "cancelled")
            assert task.request.sink.ended.reason == "cancelled"
            assert task not in server.loop.tasks()
    server.run()
    for task in tasks:
        want, got = expected(task), task.request.sink.tokens
        assert got == want[: len(got)]
        if task not in cancelled:
            assert got == want
    server.check_empty()


def test_sampling_options_follow_their_request():
    """Rows next to each other, each with its own options: bias, penalties, log probabilities, seeds."""
    server = Server(rows=4)
    biased = server.ask(5, 4, sampling=SamplingOptions(temperature=0, logit_bias={30: 50}), logprobs=2)
    repeated = server.ask(5, 8, sampling=SamplingOptions(temperature=0, frequency_penalty=2, logit_bias={40: 12}))
    plain = server.ask(5, 4)
    warm = [server.ask(5, 8, sampling=SamplingOptions(temperature=9.0, seed=s)) for s in (1, 1)]
    server.run()
    assert biased.request.sink.tokens == [30] * 4
    assert plain.request.sink.tokens == expected(plain)
    assert repeated.request.sink.tokens.count(40) == 2  # 12 - 2 * 2 < 9
    first = biased.request.sink.logprobs[0]
    assert first.token_id == 30 and first.top[0][0] == expected(biased)[0] and len(first.top) == 2
    assert plain.request.sink.logprobs == [None] * 4
    # The prompts differ, so the likeliest tokens do, but the noise is the same.
    other = Server(rows=4)
    alone = other.ask(5, 8, sampling=SamplingOptions(temperature=9.0, seed=1))
    alone.request.token_ids[:] = warm[0].request.token_ids
    other.run()
    assert alone.request.sink.tokens == warm[0].request.sink.tokens


class Only:
    """A constraint: ids of a set, then the end."""

    def __init__(self, ids: list[int]):
        self.left, self.seen = ids, []

    def fill(self, mask: np.ndarray) -> bool:
        next_id = self.left[0] if self.left else EOS
        mask[next_id // 32] = np.array(1 << (next_id % 32), np.uint32).view(np.int32)
        return True

    def advance(self, token_id: int) -> None:
        assert self.left.pop(0) == token_id
        self.seen.append(token_id)


def test_constraints_hold_for_their_own_row():
    server = Server(rows=4)
    constraint = Only([31, 32, 5])
    limited, free = server.ask(5, 10, constraint=constraint), server.ask(5, 6)
    server.run()
    assert limited.request.sink.tokens == constraint.seen == [31, 32, 5]
    assert limited.request.sink.ended.reason == "stop"
    assert free.request.sink.tokens == expected(free)


def test_a_constraint_that_fails_ends_its_request_only(caplog):
    class Broken(Only):
        def fill(self, mask):
            if len(self.seen) == 1:
                raise RuntimeError("broken on purpose")
            return super().fill(mask)

    class Nothing(Only):
        def fill(self, mask):
            return True

    server = Server(rows=4)
    broken, nothing = server.ask(constraint=Broken([1, 2])), server.ask(constraint=Nothing([]))
    free = server.ask()
    server.run()
    assert broken.request.sink.ended.reason == nothing.request.sink.ended.reason == "failed"
    assert "broken on purpose" in broken.request.sink.ended.message and "no token" in nothing.request.sink.ended.message
    assert free.request.sink.tokens == expected(free)
    server.check_empty()


def test_steps_survive_the_wire():
    rng = np.random.default_rng(0)
    steps = [
        SetRows(np.array([3], np.int32), rng.integers(0, 9, (1, 5)).astype(np.int32), np.zeros((2, 1), np.int32)),
        Block(
            first=2,
            layers="all",
            token_ids=rng.integers(0, 9, (2, 4)).astype(np.int32),
            **{name: np.arange(2, dtype=np.int32) for name in ("start", "n_valid", "write_floor")},
            engram_rows=rng.integers(0, 9, (3, 2, 4, 5)),
            image_mask=np.array([[True, False] * 2] * 2),
            image_embeds=rng.normal(size=(2, 4, 8)).astype("bfloat16"),
        ),
        EmbedImage(rng.normal(size=(6, 3, 2, 2)).astype(np.float32), (2, 3)),
    ]
    for step in steps:
        again = from_bytes(to_bytes(step))
        assert type(again) is type(step)
        for name, value in vars(step).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(again, name), value)
                assert getattr(again, name).dtype == value.dtype
            else:
                assert getattr(again, name) == value
    with pytest.raises(ValueError, match="bytes came as"):
        from_bytes(to_bytes(steps[0])[:-1])


# --- the thread ------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    server = Server(rows=2, pages=16)
    made = ServingEngine(server.loop, max_queued=3)
    made.start()
    yield made, server
    made.stop()


def ask(name: str, n: int = 5, most: int = 6, **more) -> GenerationRequest:
    return GenerationRequest(
        name, np.arange(n, dtype=np.int32) % 50, SamplingOptions(temperature=0), most, frozenset([EOS]), Sink(), **more
    )


def test_the_engine_serves_and_counts(engine):
    made, _ = engine
    requests = [ask(str(i)) for i in range(4)]
    made.submit(requests)
    assert all(request.sink.over.wait(20) for request in requests)
    assert all(request.sink.tokens == [5, 6, 7, 8, 9, 10] for request in requests)
    assert made.drain(20)
    state = made.state()
    assert (state.prompt_tokens, state.completion_tokens, state.waiting, state.reading, state.writing) == (
        20,
        24,
        0,
        0,
        0,
    )
    assert state.free_pages == state.pages == 16
    with pytest.raises(NotServing):
        made.submit([ask("late")])


def test_the_engine_refuses(engine):
    made, server = engine
    for request, message in [
        (ask("a", n=0), "empty"),
        (ask("a", n=1000, most=100), "exceed"),
        (ask("a", most=0), "max_tokens"),
    ]:
        with pytest.raises(RequestError, match=message):
            made.submit([request])
    wrong = ask("a")
    wrong.token_ids[2] = VOCAB
    with pytest.raises(RequestError, match="token ids"):
        made.submit([wrong])
    with pytest.raises(RequestError, match="no more than 5"):
        made.submit([ask(str(i)) for i in range(6)])
    with pytest.raises(RequestError, match="must be new"):
        made.submit([ask("a"), ask("a")])
    hold = threading.Event()
    server.executor.on_step = lambda step: hold.wait(20)
    requests = [ask(str(i), most=20) for i in range(5)]
    made.submit(requests)
    with pytest.raises(QueueFull) as full:
        made.submit([ask("one more")])
    assert full.value.retry_after >= 1
    hold.set()
    assert all(request.sink.over.wait(20) for request in requests)


def test_the_engine_cancels_and_keeps_deadlines(engine):
    made, server = engine
    hold = threading.Event()
    server.executor.on_step = lambda step: hold.wait(20)
    running, waiting = ask("running", most=500), ask("waiting", most=5)
    late = ask("late", most=500, deadline=time.monotonic() + 0.2)
    made.submit([late, running, waiting])
    time.sleep(0.3)
    made.cancel("running")
    made.cancel("nobody")
    hold.set()
    assert running.sink.over.wait(20) and running.sink.ended.reason == "cancelled"
    assert late.sink.over.wait(20) and late.sink.ended.reason == "deadline" and "time limit" in late.sink.ended.message
    assert waiting.sink.over.wait(20) and waiting.sink.ended.reason == "length"
    made.cancel("running")  # it is gone
    assert made.drain(20) and made.state().free_pages == 16


def test_an_engine_that_breaks_says_so(caplog):
    server = Server(rows=2)
    failures = []
    made = ServingEngine(server.loop, 8, failures.append)
    made.start()

    def fail(step):
        raise RuntimeError("the device is gone")

    server.executor.on_step = fail
    requests = [ask(str(i)) for i in range(4)]
    made.submit(requests)
    for request in requests:
        assert request.sink.over.wait(20)
        assert request.sink.ended.reason == "failed" and "the device is gone" in request.sink.ended.message
    made._thread.join(20)
    assert "the device is gone" in str(failures[0]) and not made.ready
    with pytest.raises(NotServing):
        made.submit([ask("late")])


def test_what_is_left_when_the_server_ends_is_told_so(engine):
    made, _ = engine
    requests = [ask(str(i), most=900) for i in range(3)]
    made.submit(requests)
    assert not made.drain(0.01)
    made.stop("the server ends")
    for request in requests:
        assert request.sink.over.wait(20)
        assert request.sink.ended.reason == "cancelled" and request.sink.ended.message == "the server ends"
    assert made.state().free_pages == 16


def test_a_receiver_that_fails_ends_its_request_only(engine, caplog):
    made, _ = engine
    broken, good = ask("broken"), ask("good")

    def token(token):
        raise RuntimeError("cannot")

    broken.sink.token = token
    made.submit([broken, good])
    assert broken.sink.over.wait(20) and good.sink.over.wait(20)
    assert good.sink.tokens == [5, 6, 7, 8, 9, 10]
