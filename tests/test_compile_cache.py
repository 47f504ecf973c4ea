"""Compiled programs are kept in a folder and found again by another process."""

import subprocess
import sys

from dsv41_jax.compile_cache import default_folder

PROGRAM = """
import jax, jax.numpy as jnp
from dsv41_jax import compile_cache
compile_cache.enable({folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hits" in name else None)
print(jax.jit(lambda x: jnp.cumsum(jnp.sin(x)))(jnp.arange(64.0)).sum() != 0, len(hits))
"""


def test_second_process_finds_the_program(tmp_path):
    def run() -> list[str]:
        command = [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path / "cache"))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert run() == ["True", "0"]
    assert any((tmp_path / "cache").iterdir())
    found, hits = run()
    assert found == "True" and int(hits) > 0


def test_default_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path in default_folder().parents
    assert default_folder() == default_folder()
