"""Runs of several Python processes on this machine, each with devices of its own, and a time after which all are
killed.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# On CPUs jax keeps compiled programs for process 0 alone. It would find them while the others compile, and some of the
# exchanges between CPUs give up after 30 s.
_NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def free_coordinator() -> str:
    """A loopback address with a free port, the next two free too."""
    for _ in range(100):
        port = random.randrange(20000, 60000)
        try:
            for each in (port, port + 1, port + 2):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return f"127.0.0.1:{port}"
    raise RuntimeError("no three free ports side by side")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, negative for a signal; its outputs; seconds after the start of all."""

    code: int
    out: str
    err: str
    seconds: float


class Run:
    """Processes started together. As a context manager it leaves none behind.

    Args:
        commands: arguments of `python` for each process.
        folder: where their outputs go.
        devices: CPU devices of each process.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path,
        devices: int = 1,
        environment: Mapping[str, str] | None = None,
    ):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        own = {"XLA_FLAGS": flags, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **_NO_CACHE, **(environment or {})}
        self._started = time.monotonic()
        self._outputs = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(len(commands))]
        self._processes = []
        for command, (out, err) in zip(commands, self._outputs, strict=True):
            with out.open("wb") as to_out, err.open("wb") as to_err:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, *command], stdout=to_out, stderr=to_err, env=os.environ | own, cwd=folder
                    )
                )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        self._processes[index].send_signal(number)

    def printed(self, index: int, text: str, timeout: float = 60.0) -> None:
        """Wait until a process has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self._outputs[index][0].read_text():
            if time.monotonic() > deadline or self._processes[index].poll() is not None:
                raise AssertionError(f"process {index} did not print {text!r}:\n{self._text(index)}")
            time.sleep(0.05)

    def wait(self, index: int, timeout: float) -> Ended:
        """How a process ended. AssertionError with its output if it has not ended in time."""
        try:
            code = self._processes[index].wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {index} has not ended in {timeout} s:\n{self._text(index)}") from None
        out, err = (path.read_bytes().decode(errors="replace") for path in self._outputs[index])  # "\r" stays
        return Ended(code, out, err, time.monotonic() - self._started)

    def all_well(self, timeout: float) -> list[Ended]:
        """Wait for all to end with exit code 0, within `timeout` seconds together."""
        deadline = time.monotonic() + timeout
        ended = [self.wait(i, max(0.1, deadline - time.monotonic())) for i in range(len(self._processes))]
        for i, each in enumerate(ended):
            assert each.code == 0, f"process {i} ended with {each.code}:\n{each.out}\n{each.err}"
        return ended

    def _text(self, index: int) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self._outputs[index])


def start(
    script: str, processes: int, folder: Path, devices: int = 1, arguments: Sequence[str] = (), **options: object
) -> Run:
    """The same script text in several processes; it finds coordinator, number and index in sys.argv[1:4] and
    `arguments` after them.
    """
    coordinator = free_coordinator()
    commands = [["-c", script, coordinator, str(processes), str(i), *arguments] for i in range(processes)]
    return Run(commands, folder, devices, **options)
