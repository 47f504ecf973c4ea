"""Runs `launch/convert.py` in processes of their own, which can kill themselves at a chosen moment.

A run counts what it does in the folder it is told of: files opened, made, renamed, removed. It can be killed (SIGKILL)
just before any of these, so a kill can be put anywhere in a run and found again by its number.

The processes are forked from one that has imported everything, because importing takes longer than a conversion here.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["launch.convert", "dsv41_jax.load", "dsv41_jax.checkpoint.convert", "dsv41_jax.checkpoint.orbax"]
)
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.truncate"}


@dataclass(frozen=True)
class Run:
    """What came of a run: exit code (-9: killed), what it printed; if it ended, its steps and the memory it took."""

    code: int
    shown: str
    steps: int = 0
    memory: int = 0


class Child:
    """A run of `launch/convert.py` with `argv`, its output and its steps in files under `folder`.

    Args:
        argv: the command line. folder: whose events count; has to exist.
        kill_at: the number of the step before which it kills itself, or None.
        commit: whether every piece is entered in the journal by itself.
        environment: variables.
    """

    count = 0

    def __init__(self, argv, folder: Path, kill_at: int | None = None, commit: bool = True, environment=None):
        Child.count += 1
        self._log = folder.parent / f"{folder.name}-run-{Child.count}"
        arguments = ([str(a) for a in argv], str(folder), kill_at, commit, environment or {}, str(self._log))
        self.process = CONTEXT.Process(target=_main, args=arguments)
        self.process.start()

    def result(self, timeout: float = 120) -> Run:
        """Wait for its end."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"{self._log.read_text()}\nthe run did not end in {timeout} s")
        figures = Path(f"{self._log}.figures")
        found = json.loads(figures.read_text()) if figures.exists() else {}
        return Run(self.process.exitcode, self._log.read_text(), **found)


def run(argv, folder: Path, **options) -> Run:
    """Run to the end, or to the kill."""
    return Child(argv, folder, **options).result()


def peak_memory() -> int:
    """Bytes of memory that this process has had resident at most."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def _main(argv: list[str], folder: str, kill_at: int | None, commit: bool, environment: dict, log: str) -> None:
    os.environ.update(environment)
    steps = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal steps
        if event in _EVENTS and any(isinstance(a, str | os.PathLike) and folder in os.fspath(a) for a in arguments):
            steps += 1
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    from tqdm import tqdm

    from dsv41_jax.checkpoint import transfer
    from launch.convert import main

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a kill leaves behind
    if commit:
        transfer.COMMIT_SECONDS = 0
    before = peak_memory()
    with open(log, "w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.addaudithook(count)
        code = main(argv)
    Path(f"{log}.figures").write_text(json.dumps({"steps": steps, "memory": peak_memory() - before}))
    sys.exit(code)
