"""The load generator against a scripted server: what it sends, what it counts, what it says of failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dsv41_jax.load_test import command, picture, report
from dsv41_jax.load_test.client import Options, Outcome, complete
from dsv41_jax.load_test.connection import Server
from dsv41_jax.load_test.drive import Load, Measured, run
from dsv41_jax.load_test.workload import MIXES, Planned, Shape, arrivals, parse_mix, requests
from launch import bench
from load_server import scripted
from processes import ROOT

SHAPE = Shape("s", 1, 5, 6)
ONE = Planned(SHAPE, (1, 2, 3, 4, 5), 7)


def serve(server, *flags: str) -> None:
    bench.main(["serve", f"--url={server.url}", "--warmup=1", "--mix=a:3:5:4,b:1:9:8", *flags])


def send(server, **options) -> Outcome:
    return asyncio.run(complete(Server(server.url), Options("m", **options), ONE))


# What is sent


def test_mixes_are_read_and_drawn_by_weight():
    for name in MIXES:
        assert all(shape.prompt and shape.output for shape in parse_mix(name))
    mix = parse_mix("short:0.75:4:2,long:0.25:40:3")
    assert mix == (Shape("short", 0.75, 4, 2), Shape("long", 0.25, 40, 3))
    drawn = list(itertools.islice(requests(mix, range(10, 20), 1), 400))
    assert 270 < sum(one.shape.name == "short" for one in drawn) < 330
    assert all(len(one.token_ids) == one.shape.prompt for one in drawn)
    assert {each for one in drawn for each in one.token_ids} == set(range(10, 20))
    again = list(itertools.islice(requests(mix, range(10, 20), 1), 400))
    assert again == drawn and next(requests(mix, range(10, 20), 2)) != drawn[0]
    json.dumps(drawn[0].token_ids)  # Python's integers, not numpy's


@pytest.mark.parametrize("text", ["", "chats", "a:1:2", "a:1:2:x", "a:0:2:2", "a:nan:2:2", "a:1:0:2", "a:1:2:2,"])
def test_a_wrong_mix_is_named(text):
    with pytest.raises(ValueError, match="NAME:WEIGHT:PROMPT:OUTPUT|above 0"):
        parse_mix(text)


def test_arrivals_are_a_poisson_process():
    at = np.array(list(itertools.islice(arrivals(50.0, 3), 4000)))
    gaps = np.diff(at)
    assert at[-1] == pytest.approx(80, rel=0.05) and gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert list(itertools.islice(arrivals(50.0, 3), 10)) == at[:10].tolist()


def test_a_request_says_what_it_must():
    with scripted() as server:
        outcome = send(server, temperature=0.5, end_id=1)
    [body] = server.asked
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 6,
        "temperature": 0.5,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"1": -100},
    }
    assert (outcome.error, outcome.finish, outcome.ended_early) == (None, "length", False)


# What is counted


def test_times_are_those_of_the_server():
    with scripted(first=0.1, each=0.03) as server:
        outcome = send(server)
    assert (outcome.prompt_tokens, outcome.completion_tokens, len(outcome.texts)) == (5, 6, 6)
    # Sleeps are never shorter, but a text can be read late, and then the next ones come sooner after it.
    assert 0.1 <= outcome.first < 1 and 0.015 <= outcome.per_token < 0.3
    assert len(outcome.gaps) == 5 and min(outcome.gaps) > 0.015
    assert outcome.end >= outcome.texts[-1] + 0.015


@pytest.mark.parametrize(
    ("script", "kind", "detail"),
    [
        ({"fail_every": 1}, "HTTP 429", "full"),
        ({"broken": "cut"}, "broken answer", "broken off"),
        ({"broken": "finish"}, "no finish", "finish_reason"),
        ({"broken": "event"}, "error event", "the engine broke"),
        ({"first": 5.0}, "timeout", "0.3 s"),
        ({"key": "secret"}, "HTTP 401", "no"),
    ],
)
def test_failures_have_a_kind(script, kind, detail):
    with scripted(**script) as server:
        outcome = send(server, timeout=0.3)
    assert outcome.error == kind and detail in outcome.detail and not outcome.ended_early


def test_no_connection_is_an_error_too():
    outcome = asyncio.run(complete(Server("http://127.0.0.1:1"), Options("m"), ONE))
    assert outcome.error == "no connection" and outcome.detail


def outcome(first: float, per_token: float, tokens: int, asked: int = 4, error: str | None = None) -> Outcome:
    texts = [first + per_token * number for number in range(tokens)]
    return Outcome("s", 10, asked, texts=texts, end=texts[-1], error=error, prompt_tokens=10, completion_tokens=tokens)


def test_the_numbers_of_a_load():
    good = [outcome(0.1 * number, 0.01, 4) for number in range(1, 101)]
    bad = [outcome(9.0, 9.0, 2, error="HTTP 429"), outcome(9.0, 9.0, 2, error="timeout")] * 2 + [
        outcome(9.0, 9.0, 2, error="timeout")
    ]
    row = report.summary(Measured(Load("closed", 8, 105), 20.0, [*good, *bad, outcome(0.1, 0.01, 2)]))
    assert (row["sent"], row["complete"], row["ended_early"]) == (106, 101, 1)
    assert row["errors"] == {"timeout": 3, "HTTP 429": 2} and list(row["errors"])[0] == "timeout"
    assert row["output_tokens"] == 402 and row["asked_tokens"] == 404 and row["prompt_tokens"] == 1010
    assert row["output_tokens_per_second"] == pytest.approx(20.1)
    assert row["requests_per_second"] == pytest.approx(5.05)
    assert row["first_token"]["max"] == pytest.approx(10.0) and row["first_token"]["p50"] == pytest.approx(5.0)
    assert row["per_token"]["p99"] == pytest.approx(0.01) and row["gap"]["count"] == 301
    text = report.tables([row])
    assert "| 8 clients | 101 of 106 | 1 | 402 of 404 | 20.1 | 5.05 | 1,010 | 0% | 3 x timeout, 2 x HTTP 429 |" in text
    assert "| 8 clients | first token | 5,000.0 |" in text and "--end_id" in text


def test_a_load_without_an_answer_has_no_times():
    row = report.summary(Measured(Load("open", 0.5, 1), 1.0, [outcome(1, 1, 2, error="timeout")]))
    assert row["first_token"] is None and "first token" not in report.tables([row])


# Loops


def drive(server, load: Load, seed: int = 0) -> Measured:
    target, options = Server(server.url), Options("m")
    return asyncio.run(run(load, requests([SHAPE], range(9), seed), lambda p, due: complete(target, options, p, due)))


def test_a_closed_loop_has_so_many_at_once():
    with scripted() as server:
        measured = drive(server, Load("closed", 3, requests=11))
    assert server.together == 3 and len(measured.outcomes) == len(server.asked) == 11
    assert measured.seconds > 11 / 3 * 0.04


def test_an_open_loop_waits_for_nobody():
    with scripted(first=0.3) as server:
        measured = drive(server, Load("open", 50, requests=12))
    assert len(measured.outcomes) == 12 and server.together >= 6
    ends = next(itertools.islice(arrivals(50, 0), 11, None))
    assert ends + 0.3 < measured.seconds < ends + 3


def test_a_duration_ends_a_load_and_refusals_are_paused():
    with scripted(fail_every=2) as server:
        measured = drive(server, Load("closed", 2, duration=0.4))
    kinds = {each.error for each in measured.outcomes}
    assert kinds == {None, "HTTP 429"} and measured.seconds < 3
    with scripted(fail_every=1) as server:
        server._answer = lambda writer, status, body, more="": type(server)._answer(writer, status, body)
        measured = drive(server, Load("closed", 1, duration=0.3))
    assert len(measured.outcomes) == 1  # without Retry-After it waits longer than the load lasts
    with scripted() as server:
        assert 5 < len(drive(server, Load("open", 60, duration=0.3)).outcomes) < 40


# The command


def test_a_sweep_is_printed_drawn_and_written(tmp_path, capsys):
    out, png = tmp_path / "found.json", tmp_path / "sweep.png"
    with scripted(key="secret", first=0.005, each=0.002) as server:
        key = tmp_path / "keys"
        key.write_text("# of the tests\nsecret\nother\n")
        serve(server, f"--api_key_file={key}", "--concurrency=1,3", "--requests=8", f"--out={out}", f"--png={png}")
    text = capsys.readouterr().out
    assert text.startswith("scripted at http://127.0.0.1") and "a:3:5:4, b:1:9:8" in text
    assert "| 1 client | 8 of 8 | 0 |" in text and "| 3 clients | gap in the text |" in text
    assert len(server.asked) == 1 + 8 + 8 and len({tuple(body["prompt"]) for body in server.asked}) == 17
    letters = {each for body in server.asked for each in body["prompt"]}
    assert letters <= set(range(128)) and len(letters) > 20  # of the sample text, by /tokenize
    found = json.loads(out.read_text())
    assert found["model"] == "scripted" and found["settings"]["mix"] == ["a:3:5:4", "b:1:9:8"]
    assert [row["sent"] for row in found["results"]] == [8, 8]
    assert [len(row["requests"]) for row in found["results"]] == [8, 8]
    assert "secret" not in out.read_text() + text
    with Image.open(png) as image:
        assert image.size == (1200, 724) and image.format == "PNG"


def test_early_ends_and_errors_are_told(capsys):
    with scripted(tokens=3, fail_every=4) as server:
        serve(server, "--rate=100", "--requests=7", "--vocab=5:9", "--json")
    [row] = json.loads(capsys.readouterr().out)["results"]
    assert (row["load"], row["sent"], row["complete"]) == ("100 requests/s", 7, 5)
    assert row["errors"] == {"HTTP 429": 2} and row["ended_early"] == 5 and row["output_tokens"] == 15
    assert {each for body in server.asked for each in body["prompt"]} == set(range(5, 9))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"ready": (503, {"status": "warming up"})}, "is not ready: it is warming up or draining"),
        ({"ready": (404, {})}, "answered 404"),
        ({"key": "secret"}, "wants an API key (401): give --api_key_file"),
        ({"fail_every": 1}, "a warm-up request failed: HTTP 429"),
    ],
)
def test_a_server_that_cannot_be_measured(script, message):
    with scripted(**script) as server, pytest.raises(SystemExit) as ended:
        serve(server, "--requests=1")
    assert message in ended.value.code and "secret" not in ended.value.code


def test_where_keys_come_from(monkeypatch, tmp_path):
    assert command.api_key(None) is None
    monkeypatch.setenv("DSV41_API_KEYS", " one, two")
    assert command.api_key(None) == "one"
    (tmp_path / "keys").write_text("# nothing\n\n")
    with pytest.raises(ValueError, match="no key"):
        command.api_key(str(tmp_path / "keys"))


def test_no_server_and_no_address():
    for url, message in (("http://127.0.0.1:1", "python launch/serve.py"), ("127.0.0.1:8000", "http://HOST:PORT")):
        with pytest.raises(SystemExit) as ended:
            bench.main(["serve", f"--url={url}"])
        assert message in ended.value.code


@pytest.mark.parametrize(
    "flags",
    [
        *(["--concurrency=0"], ["--concurrency=1.5"], ["--concurrency="], ["--rate=-1"], ["--rate=inf"]),
        *(["--concurrency=1", "--rate=1"], ["--requests=0"], ["--duration=0"], ["--warmup=-1"], ["--vocab=9:9"]),
        *(["--mix=a:b"], ["--out=/nowhere/x.json"], ["--png=/nowhere/x.png"], ["--timeout=nan"]),
    ],
)
def test_flags_are_checked(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["serve", "--url=http://127.0.0.1:1", *flags])
    assert ended.value.code == 2 and "usage" in capsys.readouterr().err


def test_the_picture_has_a_point_for_each_value(tmp_path):
    rows = [report.summary(Measured(Load("closed", n, 4), 1.0, [outcome(0.1 * n, 0.01, 4)] * n)) for n in (1, 2, 4)]
    failed = report.summary(Measured(Load("closed", 8, 1), 1.0, [outcome(1, 1, 2, error="timeout")]))
    for number, each in enumerate((rows, [*rows, failed], [failed])):
        picture.draw(each, tmp_path / f"{number}.png", "title")
    red = [  # of p99, which is drawn last
        sum(np.all(np.array(Image.open(tmp_path / f"{n}.png").convert("RGB")) == (0xC4, 0x4E, 0x52), axis=-1).flat)
        for n in range(3)
    ]
    assert red[0] > red[2] > 0 and red[1] > red[2]
    for least, step in ((0.003, 0.005), (0.9, 1), (1, 1), (1.1, 2), (23, 50), (499, 500), (501, 1000)):
        assert picture._nice(least) == pytest.approx(step)


def test_the_generator_touches_no_device():
    """It may run beside a server that has the accelerator, which two processes cannot have."""
    code = (
        "import jax, sys\nfrom launch import bench\n"
        "try:\n    bench.main(['serve', '--url=http://127.0.0.1:1'])\nexcept SystemExit: pass\n"
        "from jax._src import xla_bridge\nprint(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
