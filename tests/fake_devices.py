"""Runs a test's function in a process with eight CPU devices: `jax` fixes their number when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEVICES = 8


def run_case(module: str, function: str, *arguments: str, seconds: float = 600) -> None:
    """Call `module.function(*arguments)` of this folder with eight devices; AssertionError shows its output."""
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    call = f"import conftest, {module}; {module}.{function}(*{arguments!r})"  # conftest turns the compilation cache on
    done = subprocess.run(
        [sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{module}.{function}{arguments} failed:\n{done.stdout}\n{done.stderr}"
