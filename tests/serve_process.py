"""launch/serve.py in a process of its own, on loopback and a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from processes import ROOT


class ServeProcess:
    """A server of the demo model, or of another one by its flags. As a context manager it leaves no process behind.

    Attributes:
        url: where it listens, once `wait_ready` has returned. log: what it has said.
    """

    def __init__(self, folder: Path, *flags: str, config: str | None = "configs/serve_demo.py", port: int = 0):
        self._log = folder / "serve.log"
        command = [sys.executable, str(ROOT / "launch" / "serve.py"), f"--port={port}", *flags]
        command += [] if config is None else [f"--config={ROOT / config}"]
        with self._log.open("wb") as log:
            # Optimised code, as users run it: what compiles longer is paid back here.
            environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        self.url = ""

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace").replace("\r", "\n")

    def wait_ready(self, seconds: float = 300) -> ServeProcess:
        """Until it says where it listens; AssertionError with its log if it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(r"ready: (http://\S+)", self.log)):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready after {seconds} s:\n{self.log}"
            time.sleep(0.1)
        self.url = found[1]
        return self

    def terminate(self, seconds: float = 60) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def state(self) -> dict:
        """GET /state."""
        return httpx.get(f"{self.url}/state").raise_for_status().json()
