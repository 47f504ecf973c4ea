"""Reading Engram rows ahead, and keeping hot ones: the same rows, counted by hand, and threads that end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.engram_hot_rows import WAYS, HotRows
from dsv41_jax.engram_prefetch import PrefetchingTable
from dsv41_jax.engram_tables import HostTable
from random_configs import random_legal_config
from random_models import random_token_map, write_model

ROWS, WIDTH = 4000, 64
STORED = WIDTH + WIDTH // 32  # bytes of a row: codes and scales
ENTRY = STORED + 16  # and its bookkeeping


@pytest.fixture(scope="module")
def source() -> HostTable:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (ROWS, WIDTH), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(120, 130, (ROWS, WIDTH // 32), dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    return HostTable(codes, scales)


class Watched(HostTable):
    """A table that notes every read, can be held up, and can fail."""

    def __init__(self, source: HostTable):
        super().__init__(*source._parts)
        self.reads: list[int] = []
        self.gate, self.error = threading.Event(), None
        self.gate.set()

    def read(self, distinct):
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.reads += distinct.tolist()
        return super().read(distinct)


@pytest.fixture
def watched(source):
    return Watched(source)


def engram_threads() -> int:
    return sum(thread.name.startswith("engram") for thread in threading.enumerate())


# --- the same rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hot_bytes", [0, 5 * ENTRY, 300 * ENTRY, ROWS * ENTRY * 2])
def test_rows_are_those_of_the_table(source, hot_bytes):
    """Random blocks, announced or not, in order or not, partly or never asked for."""
    rng, table = np.random.default_rng(1), PrefetchingTable(source, hot_bytes)
    assert table.shape == (ROWS, WIDTH)
    blocks = [rng.zipf(1.3, (2, n, 6)) % ROWS for n in rng.integers(0, 40, 60)]
    for i, block in enumerate(blocks):
        rows = table.rows(block)
        np.testing.assert_array_equal(rows, source.rows(block))
        assert rows.dtype == source.dtype
        if i + 1 < len(blocks):
            match rng.integers(4):
                case 0:
                    table.prefetch(blocks[i + 1])
                case 1:
                    table.prefetch(blocks[i + 1][:, ::2])
                case 2:
                    table.prefetch(rng.integers(0, ROWS, 50))
    stats = table.stats
    assert stats.asked == sum(len(np.unique(block)) for block in blocks)
    assert 0 < stats.prefetched < stats.asked
    assert (stats.hot > 0) == (hot_bytes > 0)
    assert stats.kept_bytes <= hot_bytes and stats.kept_rows <= hot_bytes // ENTRY
    assert stats.read_bytes == stats.read_rows * STORED
    table.close()


def test_threads_may_share_a_table(source):
    table, failures = PrefetchingTable(source, 200 * ENTRY), []

    def use(seed):
        rng = np.random.default_rng(seed)
        for _ in range(40):
            ids = rng.integers(0, 500, (3, 20))
            table.prefetch(rng.integers(0, 500, 30))
            if not np.array_equal(table.rows(ids), source.rows(ids)):
                failures.append(seed)

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not failures
    table.close()


# --- what is counted, by hand ----------------------------------------------------------------------------------------


def test_counts_without_hot_rows(watched):
    table = PrefetchingTable(watched)
    table.rows(np.array([[5, 3, 5], [3, 9, 5]]))  # 3 distinct, read while waiting
    table.prefetch(np.array([7, 8, 8]))
    table.rows(np.array([8, 7]))  # both announced
    table.prefetch(np.array([1, 2]))
    table.rows(np.array([2, 3]))  # one announced, one not; 1 was read in vain
    table.rows(np.array([2]))  # nothing is kept
    stats = table.stats
    assert (stats.asked, stats.hot, stats.prefetched) == (3 + 2 + 2 + 1, 0, 2 + 1)
    assert stats.read_rows == 3 + 2 + (2 + 1) + 1 == len(watched.reads)
    assert stats.read_bytes == 9 * STORED
    assert (stats.kept_rows, stats.kept_bytes, stats.hit_rate) == (0, 0, 0.0)
    assert stats.lookups == 6 + 2 + 2 + 1
    assert stats.lookups_per_second == stats.lookups / stats.seconds > 0
    fresh = PrefetchingTable(watched).stats
    assert fresh.hit_rate == fresh.lookups_per_second == 0.0
    table.close()


def test_counts_with_hot_rows(watched):
    """Room for 3 rows, one set: the least recently used goes."""
    table = PrefetchingTable(watched, 3 * ENTRY + 5)
    for ids, read in (
        ([1, 2], [1, 2]),
        ([1, 2, 1], []),
        ([3], [3]),
        ([2], []),
        ([4], [4]),  # 1 goes
        ([2, 4], []),
        ([1], [1]),  # 3 goes
        ([3, 2], [3]),  # 2 was used later than 4, which goes
    ):
        before = len(watched.reads)
        table.rows(np.array(ids))
        assert sorted(watched.reads[before:]) == read, ids
    stats = table.stats
    assert (stats.asked, stats.hot, stats.prefetched) == (2 + 2 + 1 + 1 + 1 + 2 + 1 + 2, 2 + 1 + 2 + 1, 0)
    assert stats.hit_rate == pytest.approx(6 / 12)
    assert (stats.kept_rows, stats.kept_bytes) == (3, 3 * ENTRY)
    table.prefetch(np.array([2, 11]))  # 2 is hot already, and counts as that
    table.rows(np.array([2, 11]))
    assert (table.stats.hot, table.stats.prefetched) == (7, 1)
    assert table.stats.read_rows == len(watched.reads) == 7
    table.close()


def test_hot_rows_equal_a_python_model():
    """Sets of 8 with the least recently used forgotten, against dictionaries in order of use; row by row."""
    rng, hot = np.random.default_rng(2), HotRows(8, 5 * WAYS * 24, 300)
    sets: list[dict[int, None]] = [{} for _ in range(5)]
    for id_ in (rng.zipf(1.3, 2000) % 300).tolist():
        own, out = sets[id_ % 5], np.zeros((1, 8), np.uint8)
        row = ((id_ + np.arange(8)) % 256).astype(np.uint8)
        held = hot.find(np.array([id_]), out)
        assert held.tolist() == [id_ in own]
        if id_ in own:
            np.testing.assert_array_equal(out[0], row)
            own.pop(id_)
        elif len(own) == WAYS:
            own.pop(next(iter(own)))
        own[id_] = None
        if not held[0]:
            hot.put(np.array([id_]), row[None])
    assert hot.kept == sum(map(len, sets)) == 5 * WAYS
    assert hot.nbytes == 5 * WAYS * 24


@pytest.mark.parametrize("rows", [1, 8, 9, 30])
def test_a_small_table_is_held_whole(rows):
    hot, ids = HotRows(8, 1 << 30, rows), np.arange(rows)
    hot.put(ids, np.zeros((rows, 8), np.uint8))
    assert hot.kept == rows and hot.find(ids, np.zeros((rows, 8), np.uint8)).all()
    assert hot.nbytes <= (rows + WAYS - 1) * 24


def test_more_new_rows_than_a_set_holds():
    hot, ids = HotRows(8, 5 * WAYS * 24, 300), np.arange(0, 100, 5)  # 20 rows of set 0
    rows = np.repeat(ids[:, None], 8, axis=1).astype(np.uint8)
    hot.put(ids, rows)
    out = np.zeros_like(rows)
    held = hot.find(ids, out)
    assert held.sum() == hot.kept == WAYS
    np.testing.assert_array_equal(out[held], rows[held])


# --- in the background -----------------------------------------------------------------------------------------------


def test_prefetch_returns_at_once_and_rows_wait(watched):
    table = PrefetchingTable(watched)
    watched.gate.clear()
    table.prefetch(np.arange(100))  # would wait for ever if it read
    assert not watched.reads
    found = []
    waiting = threading.Thread(target=lambda: found.append(table.rows(np.arange(100))))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not found
    watched.gate.set()
    waiting.join(30)
    np.testing.assert_array_equal(found[0], watched.rows(np.arange(100)))
    table.close()


def test_two_announced_blocks_wait(watched):
    table = PrefetchingTable(watched)
    for first in (0, 100, 200):
        table.prefetch(np.arange(first, first + 4))  # the third makes the first be forgotten
    for first, ahead in ((0, 0), (100, 4), (200, 8), (300, 8)):
        table.rows(np.arange(first, first + 4))
        assert table.stats.prefetched == ahead
    table.prefetch(np.array([1]))
    table.rows(np.zeros((2, 0), np.int32))  # takes nothing
    table.rows(np.array([1]))
    assert table.stats.prefetched == 9
    table.close()


def test_errors_come_out_of_rows(watched):
    table = PrefetchingTable(watched, 10 * ENTRY)
    watched.error = EOFError("the file ends")
    table.prefetch(np.array([1, 2]))
    with pytest.raises(EOFError, match="the file ends"):
        table.rows(np.array([2]))
    with pytest.raises(EOFError, match="the file ends"):
        table.rows(np.array([3]))
    watched.error = None  # it was the moment, not the row
    np.testing.assert_array_equal(table.rows(np.array([2, 3])), watched.rows(np.array([2, 3])))
    for call in (table.rows, table.prefetch):
        with pytest.raises(IndexError, match=f"table of {ROWS}"):
            call(np.array([ROWS]))
    with pytest.raises(ValueError, match="hot_bytes=-1"):
        PrefetchingTable(watched, -1)
    table.close()


def test_no_thread_is_left(source):
    before = engram_threads()
    closed, dropped = PrefetchingTable(source), PrefetchingTable(source)
    for table in (closed, dropped):
        table.prefetch(np.arange(500))
        table.rows(np.arange(100))
    assert engram_threads() > before
    closed.close()
    readers = list(dropped._pool._threads)
    del dropped, table
    for thread in readers:
        thread.join(30)
    assert engram_threads() == before


def test_a_process_ends_with_a_block_announced():
    script = """
import numpy as np
from dsv41_jax.engram_prefetch import PrefetchingTable
from dsv41_jax.engram_tables import HostTable
table = PrefetchingTable(HostTable(np.ones((1000, 32), np.float32), None, np.float32))
table.prefetch(np.arange(1000))
print(table.rows(np.arange(3)).sum())
table.prefetch(np.arange(1000))
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=root)
    assert (done.returncode, done.stdout.strip()) == (0, "96.0"), done.stderr


# --- the model -------------------------------------------------------------------------------------------------------


def test_logits_are_equal_bit_for_bit_in_the_three_places(tmp_path):
    """Two blocks of prompt, the second one's rows announced, and a block of three tokens."""
    config = random_legal_config(25)
    write_model(tmp_path / "model", config, 25)
    token_map = random_token_map(config, 25)
    ids = np.random.default_rng(0).integers(3, config["text_config"]["vocab_size"], (1, 35)).astype(np.int32)
    found, read = {}, set()
    for place in ("device", "host", "mmap"):
        model = ds.load(
            tmp_path / "model", numerics="float32", token_map=token_map, engram=place, engram_hot_bytes=1000 * ENTRY
        )
        runner, layers = model._runner, model.config.engram_layer_ids
        runner.prefill_block = 16
        first, cache = model.prefill(ids[:, :32], max_len=256, all_logits=True)
        second, cache = model.decode(cache, ids[:, 32:])
        found[place] = [np.asarray(first), np.asarray(second), *map(np.asarray, jax.tree.leaves(cache.arrays))]
        for table in runner.tables.values():
            assert table.stats.prefetched and table.stats.hot
            read.add((table.stats.asked, table.stats.read_rows))
            table.close()
    assert len(read) <= len(layers)  # both places read the same
    for place in ("host", "mmap"):
        for a, b in zip(found["device"], found[place], strict=True):
            assert a.tobytes() == b.tobytes()
