"""launch/serve.py in two processes: the first serves, the second follows, and they end together."""

from __future__ import annotations

import concurrent.futures
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

import dsv41_jax as ds
from processes import ROOT, Run, free_coordinator
from text_model import write_text_model

PROMPT = "The harbour lay still; seven boats, two buoys, gulls, a jetty."


def start(folder: Path) -> Run:
    """Two processes of one device each, over which the tensor group lies."""
    write_text_model(folder / "model", o_groups=2)
    command = [str(ROOT / "launch/serve.py"), f"--coordinator={free_coordinator()}", "--processes=2"]
    settings = ["--mesh=1x1x2", "--numerics=float32", "--rows=2", "--max_len=256", "--port=0", "--engram=host"]
    model = f"--model={folder / 'model'}"
    return Run([[*command, f"--process={i}", model, *settings] for i in range(2)], folder, 1)


def url_of(folder: Path, seconds: float = 240) -> str:
    deadline = time.monotonic() + seconds
    while not (found := re.search(r"ready: (http://\S+)", (folder / "0.err").read_text(errors="replace"))):
        assert time.monotonic() < deadline, (folder / "0.err").read_text() + (folder / "1.err").read_text()
        time.sleep(0.2)
    return found[1]


def ask(url: str, tokens: int, **more) -> httpx.Response:
    body = {"model": "model", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0} | more
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_two_processes_serve_and_a_dead_follower_ends_the_first(tmp_path):
    with start(tmp_path) as run:
        url = url_of(tmp_path)
        text = ask(url, 6).json()["choices"][0]["text"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pool.submit(ask, url, 180, logit_bias={"1": -100})
            while httpx.get(f"{url}/state").json()["completion_tokens"] < 20:
                time.sleep(0.02)
            run.kill(1, signal.SIGKILL)
            killed = time.monotonic()
            first = run.wait(0, 60)
        assert time.monotonic() - killed < 30
        assert first.code not in (0, None)
        assert re.search(r"process 1 \(.*\) has ended", first.err), first.err
    expected = ds.load(tmp_path / "model", numerics="float32").generate(PROMPT, max_new_tokens=6, temperature=0)
    assert text == expected


@pytest.mark.slow
def test_sigterm_ends_both_well(tmp_path):
    """Every process of a pod gets the signal; the first one drains, the other follows it to the end."""
    with start(tmp_path) as run:
        url = url_of(tmp_path)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            running = pool.submit(ask, url, 60, logit_bias={"1": -100})
            while httpx.get(f"{url}/state").json()["completion_tokens"] < 5:
                time.sleep(0.02)
            for i in (1, 0):
                run.kill(i, signal.SIGTERM)
            assert running.result().json()["usage"]["completion_tokens"] == 60
        assert [each.code for each in run.all_well(60)] == [0, 0]
