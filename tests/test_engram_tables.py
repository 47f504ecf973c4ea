"""The three places an Engram table can be give the same rows, and the file gives them without being loaded."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.engram import gather_rows
from dsv41_jax.engram_tables import FileTable, FileTensor, HostTable
from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING, RELEASED
from engram_golden import E4M3, E8M0, GOLD, config_of, module_case, table_of

SEEDS = np.random.default_rng(0)


def write_table(path: Path, table: dict[str, np.ndarray], scale_first: bool) -> tuple[FileTensor, FileTensor]:
    """The two matrices in one file, after some other bytes, as they lie in a safetensors shard."""
    order = ["scale", "weight"] if scale_first else ["weight", "scale"]
    blob, tensors = b"header" * 11, {}
    for name in order:
        tensors[name] = FileTensor(str(path), len(blob), *table[name].shape, table[name].dtype)
        blob += table[name].tobytes()
    path.write_bytes(blob)
    return tensors["weight"], tensors["scale"]


@pytest.mark.parametrize("numerics", [RELEASED, FLOAT32], ids=lambda n: n.name)
@pytest.mark.parametrize("name", ["module0", "module3"])
def test_sources_agree(name, numerics, tmp_path):
    table, ids = table_of(module_case(name)), GOLD[f"{name}.hash_ids"]
    weight, scale = write_table(tmp_path / "table.bin", table, scale_first=name == "module3")
    device = gather_rows({k: jnp.asarray(v) for k, v in table.items()}, jnp.asarray(ids, jnp.int32), numerics)
    host = HostTable(table["weight"], table["scale"], numerics.dtype)
    file = FileTable(weight, scale, numerics.dtype)
    assert host.shape == file.shape == table["weight"].shape
    for source in (host, file):
        rows = source.rows(ids)
        assert rows.dtype == numerics.dtype
        np.testing.assert_array_equal(rows, np.asarray(device))
    np.testing.assert_array_equal(file.rows(ids).astype(np.float32), GOLD[f"{name}.rows"].astype(np.float32))
    assert file.rows(np.zeros((2, 0), np.int32)).shape == (2, 0, 32)
    file.close()


def test_sources_without_scale_agree(tmp_path):
    """A float table, as the numerics float32 and an exported training run have."""
    weight = SEEDS.standard_normal((50, 64)).astype(np.float32)
    ids = SEEDS.integers(0, 50, (2, 3, 4))
    (tmp_path / "t.bin").write_bytes(weight.tobytes())
    file = FileTable(FileTensor(str(tmp_path / "t.bin"), 0, 50, 64, np.dtype(np.float32)), None, np.float32)
    for source in (HostTable(weight, None, np.float32), file):
        np.testing.assert_array_equal(source.rows(ids), weight[ids])
    device = gather_rows({"weight": jnp.asarray(weight)}, jnp.asarray(ids, jnp.int32), FLOAT32)
    np.testing.assert_array_equal(np.asarray(device), weight[ids])
    grid = gather_rows({"weight": jnp.asarray(weight)}, jnp.asarray(ids, jnp.int32), QUANTIZED_TRAINING)
    assert 0 < np.abs(np.asarray(grid) - weight[ids]).max() <= 2.0**-4 * np.abs(weight).max()
    file.close()


def test_every_code_and_scale_dequantises_alike(tmp_path):
    """All 256 E4M3 bytes under every finite scale that keeps them normal, in the three sources."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (230, 1))
    scales = np.repeat(np.arange(12, 242, dtype=np.uint8)[:, None], 8, axis=1)
    table = {"weight": codes.view(E4M3), "scale": scales.view(E8M0)}
    ids = np.arange(230)
    want = codes.view(E4M3).astype(np.float64) * 2.0 ** (scales.astype(np.float64) - 127).repeat(32, axis=1)
    device = gather_rows({k: jnp.asarray(v) for k, v in table.items()}, jnp.asarray(ids, jnp.int32), RELEASED)
    weight, scale = write_table(tmp_path / "all.bin", table, scale_first=False)
    for rows in (np.asarray(device), HostTable(**table).rows(ids), FileTable(weight, scale).rows(ids)):
        np.testing.assert_array_equal(rows.astype(np.float64), want)


def test_device_gather_makes_nothing_of_the_tables_size():
    """Compiled for the released table (98.3e9 numbers) without having one: no temporary beyond the rows."""
    rows = config_of("released").engram_layout.table_rows[0]
    table = {"weight": jax.ShapeDtypeStruct((rows, 256), E4M3), "scale": jax.ShapeDtypeStruct((rows, 8), E8M0)}
    ids = jax.ShapeDtypeStruct((1, 64, 24), jnp.int32)
    memory = jax.jit(gather_rows, static_argnums=2).lower(table, ids, RELEASED).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 101e9
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 64 * 24 * 256 * (2 + 4)


def test_bad_rows_are_refused(tmp_path):
    table = table_of(module_case("module0"))
    weight, scale = write_table(tmp_path / "table.bin", table, scale_first=False)
    for source in (HostTable(**table), FileTable(weight, scale)):
        for ids in ([120], [-1], [0, 2**40]):
            with pytest.raises(IndexError, match="table of 120"):
                source.rows(np.array(ids))
    with pytest.raises(ValueError, match="does not fit"):
        HostTable(table["weight"], table["scale"][:-1])
    os.truncate(tmp_path / "table.bin", scale.offset + 100)
    with pytest.raises(EOFError, match="row 119"):
        FileTable(weight, scale).rows(np.array([119]))


def test_each_row_is_read_once(tmp_path, monkeypatch):
    weight, scale = write_table(tmp_path / "table.bin", table_of(module_case("module0")), scale_first=False)
    table, reads, pread = FileTable(weight, scale), [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args) or pread(*args))
    table.rows(np.array([[7, 3, 7], [3, 7, 99]]))
    assert [(size, (at - weight.offset) // 32) for _, size, at in reads if size == 32] == [(32, 3), (32, 7), (32, 99)]
    assert len(reads) == 6


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_three_rows_of_a_100_gb_file_cost_no_memory(tmp_path):
    """Pitfalls 23 and 29: released layer 1's table, sparse on disk; offsets up to 1.0e11, resident memory flat."""
    rows, path = 384_006_168, tmp_path / "engram.safetensors"
    weight = FileTensor(str(path), 4096, rows, 256, np.dtype(E4M3))
    scale = FileTensor(str(path), 4096 + rows * 256, rows, 8, np.dtype(E8M0))
    wanted = np.array([0, 2**31 // 256 + 1, rows - 1])
    codes = SEEDS.integers(0, 0x7F, (3, 256), dtype=np.uint8)
    scales = SEEDS.integers(120, 130, (3, 8), dtype=np.uint8)
    with path.open("wb") as file:
        file.truncate(scale.offset + rows * 8)
        for i, row in enumerate(wanted.tolist()):
            os.pwrite(file.fileno(), codes[i].tobytes(), weight.offset + row * 256)
            os.pwrite(file.fileno(), scales[i].tobytes(), scale.offset + row * 8)
    assert path.stat().st_size > 101e9 and path.stat().st_blocks * 512 < 1e6
    before = resident_mib()
    table = FileTable(weight, scale)
    got = table.rows(wanted[[2, 0, 1]])
    assert resident_mib() - before < 10
    want = HostTable(codes.view(E4M3), scales.view(E8M0)).rows(np.array([2, 0, 1]))
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(got[0], got[1])
    table.close()
