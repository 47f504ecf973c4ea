"""A table split over processes: the parts of all of them add up to the table's rows, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint import safetensors_file
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.engram_share import EngramShare, RowForm, own_range
from dsv41_jax.engram_tables import HostTable
from processes import start

ROWS = 1001
RNG = np.random.default_rng(0)


def scaled_table(width: int) -> tuple[np.ndarray, np.ndarray]:
    codes = RNG.integers(0, 0x7F, (ROWS, width), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return codes, RNG.integers(12, 242, (ROWS, width // 32), dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)


TABLES = {
    "released row": scaled_table(256),
    "no whole number of words": scaled_table(32),
    "float32": (RNG.standard_normal((ROWS, 48)).astype(np.float32), None),
    "bfloat16": (RNG.standard_normal((ROWS, 50)).astype(ml_dtypes.bfloat16), None),
}


def share_of(weight: np.ndarray, scale: np.ndarray | None, processes: int, process: int, **options) -> EngramShare:
    first, stop = own_range(ROWS, processes, process)
    own = HostTable(weight[first:stop], None if scale is None else scale[first:stop])
    return EngramShare(own, first, ROWS, **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("name", TABLES)
def test_parts_add_up_to_the_rows(name, processes, dtype):
    weight, scale = TABLES[name]
    shares = [share_of(weight, scale, processes, i, hot_bytes=i * 50_000) for i in range(processes)]
    ids = RNG.zipf(1.2, (2, 40, 3)) % ROWS
    ids[0, 0] = [0, ROWS - 1, own_range(ROWS, processes, processes - 1)[0]]
    for block in (ids, ids[:, ::-1], ids[:1, :0], ids[:, :1, :1] * 0):  # the last: most own nothing of it
        for share in shares[::2]:
            share.prefetch(block)
        parts = [share.rows(block) for share in shares]
        used = np.stack([(part != 0).any(-1) for part in parts]).sum(0)
        assert used.max(initial=0) <= 1  # one contributor for each row
        whole = HostTable(weight, scale, dtype)
        form = shares[0].form
        total = np.sum(parts, axis=0, dtype=np.uint32)
        rows = jax.jit(form.dequantize, static_argnums=1)(jnp.asarray(total), dtype)
        assert rows.dtype == dtype
        assert np.asarray(rows).tobytes() == whole.rows(block).tobytes()
    lookups = sum(share.stats.lookups for share in shares)
    assert lookups == 2 * ids.size + ids[:, :1, :1].size
    for share in shares:
        share.close()


def test_ranges_are_contiguous_and_nearly_equal():
    for rows, processes in ((1001, 3), (5, 8), (384_006_168, 64)):
        ranges = [own_range(rows, processes, i) for i in range(processes)]
        assert ranges[0][0] == 0 and ranges[-1][1] == rows
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
        sizes = [b - a for a, b in ranges]
        assert max(sizes) - min(sizes) <= 1


def test_the_form_of_a_released_row():
    form = RowForm(256, np.dtype(ml_dtypes.float8_e4m3fn), True)
    assert (form.weight_bytes, form.words) == (256, 66)


def test_only_own_rows_are_announced_and_read(monkeypatch):
    weight, scale = TABLES["released row"]
    share, read = share_of(weight, scale, 2, 1), []
    first = share.range[0]
    original = HostTable.read
    monkeypatch.setattr(HostTable, "read", lambda self, ids: read.append(ids + first) or original(self, ids))
    share.prefetch(np.arange(first))  # another process's
    share.prefetch(np.array([3, first + 5, first + 7]))
    share.prefetch(np.arange(first))  # displaces nothing
    share.prefetch(np.arange(first))
    share.rows(np.array([3, first + 7, first + 5, 3]))
    assert sorted(np.concatenate(read)) == [first + 5, first + 7]
    assert (share.stats.prefetched, share.stats.lookups, share.stats.asked) == (2, 2, 2)
    share.close()


def test_announced_rows_are_read_in_the_background(monkeypatch):
    weight, scale = TABLES["released row"]
    share, gate, original = share_of(weight, scale, 1, 0), threading.Event(), HostTable.read
    monkeypatch.setattr(HostTable, "read", lambda self, ids: gate.wait(30) and original(self, ids))
    share.prefetch(np.arange(100))  # would wait for ever if it read
    gate.set()
    assert (share.rows(np.arange(100)) != 0).any(-1).all()
    assert share.stats.prefetched == 100
    share.close()


def test_rows_outside_the_whole_table_are_refused():
    weight, scale = TABLES["released row"]
    share = share_of(weight, scale, 2, 0)
    for call in (share.rows, share.prefetch):
        for ids in ([ROWS], [-1], [0, 2**40]):
            with pytest.raises(IndexError, match=f"table of {ROWS}"):
                call(np.array(ids))
    share.close()
    with pytest.raises(ValueError, match="rows 999 to 2000 are no part of a table of 1001"):
        EngramShare(HostTable(weight, scale), 999, ROWS)


@pytest.mark.parametrize("place", ["host", "mmap"])
def test_a_share_of_a_folder_reads_its_own_bytes_only(tiny_folder: Path, place, monkeypatch):
    folder = ReleasedFolder.open(tiny_folder)
    layer = folder.config.engram_layer_ids[0]
    whole = folder.engram_table(layer, "host", np.float32)
    rows = whole.shape[0]
    ids, total, loaded = RNG.integers(0, rows, (3, 50)), 0, []
    original = safetensors_file._read_bytes
    monkeypatch.setattr(
        safetensors_file,
        "_read_bytes",
        lambda entry, offset, out: loaded.append(out.nbytes) or original(entry, offset, out),
    )
    for process in range(3):
        first, stop = own_range(rows, 3, process)
        share = EngramShare(folder.engram_table(layer, place, np.float32, (first, stop)), first, rows)
        total = total + share.rows(ids)
        if process == 2:
            values = share.form.dequantize(jnp.asarray(total), jnp.float32)
            np.testing.assert_array_equal(np.asarray(values), whole.rows(ids))
        share.close()
    assert sum(loaded) == (rows * whole.row_bytes if place == "host" else 0)
    with pytest.raises(IndexError, match=f"outside its {rows} rows"):
        folder.engram_table(layer, place, np.float32, (0, rows + 1))


def test_the_devices_of_two_processes_sum_their_parts(tmp_path):
    """Eight devices, the tokens of a block split over two of them or not: each has the rows of its tokens."""
    with start("from share_child import main; import sys; main(*sys.argv[1:4])", 2, tmp_path, devices=4) as run:
        for ended in run.all_well(100):
            assert "rows are equal" in ended.out
