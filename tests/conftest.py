"""What every test relies on: CPU, one device, a compilation cache that outlives the run, no network.

One device, not eight, because that is what a user's CPU has. Tests of meshes start a process of their own with
XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# Before jax is imported, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if version("jaxlib").startswith("0.10."):  # an unknown flag ends the process, so only where they are known
    # Compiling is most of the suite's cost, and unoptimised code computes the same sums.
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{fast} {os.environ.get('XLA_FLAGS', '')}".strip()
# Before numpy is imported: the oracles multiply small matrices, where threads cost more than they save.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from dsv41_jax import compile_cache

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compile_cache.default_folder()))
compile_cache.enable(os.environ["JAX_COMPILATION_CACHE_DIR"])

# The same examples in every run; no deadline, because the first example of a shape compiles.
settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("tests")


# Files that take long, longest first: at the run's end no worker should wait for another's last file. xdist hands out
# files in the order of collection with --no-loadscope-reorder.
_LONG_FILES = (
    "test_mesh_model test_model_released test_training_run test_training_mesh test_training_forward test_serve "
    "test_demo_model test_kernel_model test_model_float32 test_serving_model test_distributed_model test_mesh_parts "
    "test_distributed test_speculation_model test_grads"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def _is_loopback(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).split("%")[0]).is_loopback
    except ValueError:
        return False


def _no_network(event: str, arguments: tuple) -> None:
    """An audit hook: looking up or reaching any host but this one is an error. Unix sockets have no host."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        if isinstance(address, tuple) and not _is_loopback(address[0]):
            raise RuntimeError(f"tests may not use the network: {event} {address}")
    elif event == "socket.getaddrinfo" and not _is_loopback(arguments[0]):
        raise RuntimeError(f"tests may not use the network: {event} {arguments[0]!r}")


sys.addaudithook(_no_network)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden numbers."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny_folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny model A as a folder in the released format (single file, no tokenizer)."""
    folder = tmp_path_factory.mktemp("tinyA")
    shutil.copy(golden / "tinyA_config.json", folder / "config.json")
    shutil.copy(golden / "tinyA_model.safetensors", folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny(golden: Path, tiny_folder: Path) -> Callable:
    """`tiny("float32")`: tiny model A in those numerics, loaded once a session. It prefills in blocks of 16 tokens. A
    second argument says who computes it.
    """
    import numpy as np  # after the variables above

    import dsv41_jax as ds

    @functools.cache
    def load(numerics: str, implementation: str = "reference") -> ds.Model:
        token_map = np.load(golden / "tinyA_token_map.npz")["token_map"]
        model = ds.load(tiny_folder, numerics=numerics, token_map=token_map, implementation=implementation)
        model._runner.prefill_block = 16
        return model

    return load
