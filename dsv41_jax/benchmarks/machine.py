"""What numbers were measured on."""

import os
import platform
from pathlib import Path

import jax


def machine() -> dict[str, object]:
    """What the numbers were measured on, and how busy it is with other work: load is of the last minute."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (FileNotFoundError, StopIteration):
        cpu = platform.processor() or platform.machine()
    device = jax.devices()[0]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": f"{device.platform} {device.device_kind} x {jax.device_count()}",
        "jax": jax.__version__,
        "load": round(os.getloadavg()[0], 2),
    }
