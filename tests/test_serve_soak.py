"""Thousands of requests to one server of the demo model: whatever clients do, it ends as it began."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_process import ServeProcess

REQUESTS = 2000
CONCURRENCY = 24  # more than run and wait with these flags: some are told to come again
FLAGS = ("--max_queued=4", "--max_body_bytes=100000")
MEASURED_AFTER = 200  # requests after which the server's memory counts
GROWTH = 1.15  # most, of its memory from then on
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
WORDS = ("harbour", "a", "water", "the", "house", "of", "went", "road,", "long", "time.", "ago", "and", "été", "船")
JSON = {"content-type": "application/json"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4}

# (path, body as JSON or bytes, headers, status)
MALFORMED: list[tuple[str, Any, dict[str, str], int]] = [
    ("/v1/completions", b"{", JSON, 400),
    ("/v1/completions", b"", JSON, 400),
    ("/v1/completions", b'{"model": "\xff"}', JSON, 400),
    ("/v1/completions", b"[" * 5000, JSON, 400),
    ("/v1/completions", b'{"model": "demo", "prompt": "a", "temperature": NaN}', JSON, 400),
    ("/v1/completions", b'{"model": "demo", "prompt": "a"}', {"content-type": "text/plain"}, 415),
    ("/v1/completions", b" " * 100001, JSON, 413),
    ("/v1/completions", TEXT | {"model": "other"}, JSON, 404),
    ("/v1/completions", TEXT | {"prompt": []}, JSON, 400),
    ("/v1/completions", TEXT | {"prompt": [5, -1]}, JSON, 400),
    ("/v1/completions", TEXT | {"prompt": [5, 1 << 40]}, JSON, 400),
    ("/v1/completions", TEXT | {"prompt": [5] * 8192}, JSON, 400),
    ("/v1/completions", TEXT | {"max_tokens": 0}, JSON, 400),
    ("/v1/completions", TEXT | {"max_tokens": 1 << 70}, JSON, 400),
    ("/v1/completions", TEXT | {"temperature": "hot"}, JSON, 400),
    ("/v1/completions", TEXT | {"top_p": 10**400}, JSON, 400),
    ("/v1/completions", TEXT | {"logit_bias": {"5": 1000}}, JSON, 400),
    ("/v1/completions", TEXT | {"timeout": -1}, JSON, 400),
    ("/v1/completions", TEXT | {"guided_regex": "("}, JSON, 400),
    ("/v1/chat/completions", {"model": "demo"}, JSON, 400),
    ("/v1/chat/completions", CHAT | {"n": 0}, JSON, 400),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "nobody", "content": "x"}]}, JSON, 400),
    ("/v1/messages", CHAT | {"max_tokens": True}, JSON, 400),
    ("/v1/messages", CHAT | {"max_tokens": 4, "messages": "x"}, JSON, 400),
    ("/v1/nothing", {}, JSON, 404),
]


@dataclasses.dataclass
class Totals:
    """What became of the requests: how many ended in which way, and the tokens of answers that came whole."""

    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tokens: int = 0


def resident(server: ServeProcess) -> int:
    """Bytes of memory that the server has."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def made_up(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body: prompts of 1 to 600 tokens, one in 200 of 3,000, answers of 1 to 40."""
    path, length = draw.choice(PATHS), 3000 if draw.random() < 0.005 else draw.randint(1, 600)
    body: dict[str, Any] = {"model": "demo", "max_tokens": draw.randint(1, 40), "stream": draw.random() < 0.6}
    if path == PATHS[0]:
        body["prompt"] = [draw.randrange(5, 500) for _ in range(length)]
    else:
        text = " ".join(draw.choices(WORDS, k=1 + length // 2))  # about two tokens a word
        body["messages"] = [{"role": "user", "content": text}]
    if path != PATHS[2] and body["stream"]:
        body["stream_options"] = {"include_usage": True}
    body |= draw.choice(({}, {"temperature": 0}, {"seed": 7, "top_p": 0.9}, {"priority": -1}, {"min_p": 0.1}))
    return path, body


def check_whole(path: str, body: dict[str, Any], answer: dict[str, Any]) -> int:
    """Whether an answer is all there; its tokens."""
    if path == PATHS[2]:
        reason, tokens = answer["stop_reason"], answer["usage"]["output_tokens"]
        assert reason in ("end_turn", "max_tokens"), answer
    else:
        reason, tokens = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
        assert reason in ("stop", "length"), answer
    assert tokens <= body["max_tokens"], answer
    assert reason in ("stop", "end_turn") or tokens == body["max_tokens"], answer
    return tokens


def check_stream(path: str, body: dict[str, Any], lines: list[str]) -> int:
    """Whether a stream came to its proper end; its tokens."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if path == PATHS[2]:
        events = [json.loads(item) for item in data]
        assert events[-1] == {"type": "message_stop"}, events[-1]
        (delta,) = [event for event in events if event["type"] == "message_delta"]
        return check_whole(path, body, {"stop_reason": delta["delta"]["stop_reason"], "usage": delta["usage"]})
    assert data[-1] == "[DONE]", data[-1]
    chunks = [json.loads(item) for item in data[:-1]]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(reasons) == 1 and not any("error" in chunk for chunk in chunks), chunks
    return check_whole(path, body, {"choices": [{"finish_reason": reasons[0]}], "usage": chunks[-1]["usage"]})


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], cut_after: int, totals: Totals) -> None:
    """One request and its answer, sent again when the server is full; left after `cut_after` lines of a stream."""
    while True:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code == 429:
                await response.aread()
                totals.ends["full"] += 1
            else:
                assert response.status_code == 200, (response.status_code, await response.aread(), body)
                if not body["stream"]:
                    await response.aread()
                    totals.tokens += check_whole(path, body, response.json())
                    break
                lines = []
                async for line in response.aiter_lines():
                    if len(lines) == cut_after:
                        totals.ends["left at a line"] += 1
                        return
                    lines.append(line)
                totals.tokens += check_stream(path, body, lines)
                break
        await asyncio.sleep(int(response.headers["retry-after"]))
    totals.ends["whole"] += 1


async def one(client: httpx.AsyncClient, number: int, totals: Totals) -> None:
    """Request `number`: one in twenty is malformed, one in five is left by its client."""
    draw = random.Random(number)
    kind = draw.random()
    if kind < 0.05:
        path, body, headers, status = MALFORMED[number % len(MALFORMED)]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post(path, content=content, headers=headers)
        assert response.status_code == status, (path, content[:200], response.status_code, response.text)
        assert response.json()["error"]["message"]
        totals.ends["malformed"] += 1
        return
    path, body = made_up(draw)
    if kind >= 0.25:
        await ask(client, path, body, -1, totals)
    elif body["stream"] and kind < 0.15:
        await ask(client, path, body, draw.randrange(2 * body["max_tokens"]), totals)
    else:  # from before it is queued until after it would have ended
        try:
            async with asyncio.timeout(10 ** draw.uniform(-3, 0.7)):
                await ask(client, path, body, -1, totals)
        except TimeoutError:
            totals.ends["left in time"] += 1


async def soak(url: str, numbers: range) -> Totals:
    """All those requests, `CONCURRENCY` at a time; the first failure ends it."""
    totals, left = Totals(), iter(numbers)

    async def client_of_many() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for number in left:
                await one(client, number, totals)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(client_of_many())
    return totals


def at_rest(server: ServeProcess) -> dict[str, Any]:
    """The server's state once nothing runs, within a few seconds."""
    deadline = time.monotonic() + 10
    while True:
        state = server.state()
        busy = state["waiting"] + state["reading"] + state["writing"]
        if (not busy and state["free_pages"] == state["pages"]) or time.monotonic() > deadline:
            return state
        time.sleep(0.05)


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing_behind(tmp_path):
    with ServeProcess(tmp_path, *FLAGS) as server:
        server.wait_ready()
        asyncio.run(soak(server.url, range(MEASURED_AFTER)))
        before, began = resident(server), time.monotonic()
        totals = asyncio.run(soak(server.url, range(MEASURED_AFTER, REQUESTS)))
        seconds = time.monotonic() - began
        state, after = at_rest(server), resident(server)
        assert server.terminate() == 0
        log = server.log
    print(f"{seconds:.0f} s: {(REQUESTS - MEASURED_AFTER) / seconds:.1f} requests/s,", end=" ")
    print(f"{totals.tokens / seconds:.0f} tokens/s; {dict(totals.ends)}")
    print(f"memory {before / 1e6:.0f} MB, then {after / 1e6:.0f} MB ({after / before - 1:+.1%}); {state}")
    assert (state["waiting"], state["reading"], state["writing"], state["compilations"]) == (0, 0, 0, 0)
    assert state["free_pages"] == state["pages"]
    assert after < GROWTH * before
    assert "ERROR" not in log and "Traceback" not in log, log
    # Each way to end was tried.
    assert min(totals.ends[end] for end in ("whole", "full", "malformed", "left at a line", "left in time")) > 0
