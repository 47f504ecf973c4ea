"""Plans requests, each in a process of its own, and shows what it is doing."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from dsv41_jax.plan.report import Report, from_dict
from dsv41_jax.plan.request import Request
from dsv41_jax.topologies import NoCompiler

_NO_COMPILER = 3  # the worker's exit status
_KEPT_LINES = 12  # of what a worker that dies has said


def plan(request: Request, progress: bool = True) -> Report:
    """The report of one request.

    Raises:
        ValueError: see `Request.checked`. NoCompiler: libtpu or the CUDA plugin is missing; says what to install.
        RuntimeError: the process that compiles died.
    """
    return next(plan_all([request], progress))


def plan_all(requests: Sequence[Request], progress: bool = True) -> Iterator[Report]:
    """Reports of several requests, one after another; errors as in `plan`, before the first compilation."""
    checked = [(request.checked(), request.mesh is None) for request in requests]
    with tqdm(total=len(checked), desc="planning", unit="step", disable=not progress) as bar:
        for request, by_rule in checked:
            yield _one(request, by_rule, bar)
            bar.update()


def _one(request: Request, by_rule: bool, bar: tqdm) -> Report:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "dsv41_jax.plan.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    said: list[str] = []
    watch = threading.Thread(target=_follow, args=(worker, request, said, bar), daemon=True)
    watch.start()
    try:
        asked = {"request": dataclasses.asdict(request), "mesh_by_rule": by_rule}
        with contextlib.suppress(BrokenPipeError):  # it died: its exit status and last words say more
            worker.stdin.write(json.dumps(asked))
            worker.stdin.close()
        answer = worker.stdout.read()
        status = worker.wait()
    finally:
        if worker.poll() is None:  # interrupted
            worker.kill()
            worker.wait()
    watch.join()
    if status == _NO_COMPILER:
        raise NoCompiler(said[-1])
    if status or not answer:
        last = "\n  ".join(said[-_KEPT_LINES:])
        raise RuntimeError(f"planning {request.topology} {request.phase} failed (exit status {status}):\n  {last}")
    return from_dict(json.loads(answer))


def _follow(worker: subprocess.Popen, request: Request, said: list[str], bar: tqdm) -> None:
    """Show a worker's progress, and keep its last words."""
    begin, stage, done = time.monotonic(), ["starting"], threading.Event()

    def tick() -> None:
        while not done.wait(0.5):
            bar.set_description(f"{request.topology} {request.phase}: {stage[0]}, {time.monotonic() - begin:.0f} s")

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    for line in worker.stderr:
        line = line.rstrip()
        if line in ("tracing", "compiling", "reading the program", "reading the schedule"):
            stage[0] = line
        elif line:
            said.append(line)
    done.set()
    clock.join()
