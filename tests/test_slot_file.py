"""Files written in any order: the bytes of one written in order; and the lock that a killed process does not keep."""

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint.process_lock import LockedError, hold, is_held
from dsv41_jax.checkpoint.safetensors_file import write_file
from dsv41_jax.checkpoint.slot_file import SlotFile

RANDOM = np.random.default_rng(1)
ARRAYS = {
    "a": RANDOM.normal(size=(50, 6)).astype(np.float32),
    "b": RANDOM.integers(0, 256, (40, 16), np.uint8).view(ml_dtypes.float8_e4m3fn),
    "c": RANDOM.integers(-8, 8, (7,), np.int8),
}
TENSORS = [("a", "F32", (50, 6)), ("b", "F8_E4M3", (40, 16)), ("c", "I8", (7,))]


@pytest.fixture
def expected(tmp_path):
    write_file(tmp_path / "expected", TENSORS, lambda name: [ARRAYS[name]], {"format": "pt"})
    return (tmp_path / "expected").read_bytes()


def test_any_order_any_threads_any_number_of_times(expected, tmp_path):
    rows = [(name, i) for name, array in ARRAYS.items() for i in range(len(array))]
    RANDOM.shuffle(rows)
    files = [SlotFile(tmp_path / "file", TENSORS, {"format": "pt"}) for _ in range(2)]  # as of two processes

    def write(job):
        number, (name, i) = job
        files[number % 2].write(name, int(i), ARRAYS[name][int(i) : int(i) + 1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, enumerate(rows * 2)))
    assert (tmp_path / "file").read_bytes() == expected
    for file in files:
        file.sync()
        file.complete()
        file.close()
    assert (tmp_path / "file").read_bytes() == expected


def test_it_is_made_when_it_is_needed(tmp_path):
    file = SlotFile(tmp_path / "file", TENSORS)
    file.sync()
    assert not (tmp_path / "file").exists()
    file.complete()
    assert (tmp_path / "file").stat().st_size > 50 * 6 * 4


@pytest.mark.parametrize(
    ("name", "start", "rows"),
    [
        ("a", 0, ARRAYS["a"].astype(np.float64)),
        ("a", 49, ARRAYS["a"][:2]),
        ("a", -1, ARRAYS["a"][:1]),
        ("b", 0, ARRAYS["b"][:, :8]),
    ],
)
def test_rows_that_do_not_fit(name, start, rows, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: rows .* do not fit into"):
        SlotFile(tmp_path / "file", TENSORS).write(name, start, rows)
    assert not (tmp_path / "file").exists()


def _hold_until_killed(path, ready):
    with hold(path):
        ready.set()
        signal.pause()


def test_a_lock_ends_with_its_process(tmp_path):
    path = tmp_path / "lock"
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    child = context.Process(target=_hold_until_killed, args=(path, ready))
    child.start()
    assert ready.wait(60)
    assert is_held(path)
    with pytest.raises(LockedError, match=f"process {child.pid} on"), hold(path):
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert path.exists() and not is_held(path)
    with hold(path):
        assert is_held(path)
    assert not path.exists() and not is_held(path)
