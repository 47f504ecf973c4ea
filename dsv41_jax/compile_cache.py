"""A folder of compiled programs that outlives the process, so that only the first run of a model pays for compiling."""

import hashlib
import os
import platform
from pathlib import Path

import jax


def default_folder() -> Path:
    """The user's cache folder for this processor: compiled CPU code is not portable between processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        lines = [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    name = f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv41-jax" / "compiled" / name


def enable(folder: str | os.PathLike | None = None) -> Path:
    """Let JAX keep its compiled programs in `folder` (default: `default_folder()`), from the next compilation on."""
    chosen = default_folder() if folder is None else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return chosen
