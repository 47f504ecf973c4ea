"""Orbax folders: every byte survives, in any numerics and placement; incomplete and foreign folders are refused."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import dsv41_jax as ds
from dsv41_jax.checkpoint import orbax as module
from dsv41_jax.checkpoint.names import flatten, name_map
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.checkpoint.orbax import ENGRAM_FILE, OrbaxFolder, save_orbax
from dsv41_jax.checkpoint.released import CheckpointError, ReleasedFolder, load_params, save_released
from dsv41_jax.numerics import FLOAT32, NOQUANT, RELEASED
from oracle_weights import read_safetensors, write_safetensors


@pytest.fixture(scope="module")
def token_map(golden):
    return np.load(golden / "tinyA_token_map.npz")["token_map"]


@pytest.fixture(scope="module")
def source(tiny_folder, tmp_path_factory):
    """Tiny model A with bytes that a careless store would change: negative zeros, zeros only, NaN codes."""
    path = tmp_path_factory.mktemp("odd")
    shutil.copy(tiny_folder / "config.json", path)
    tensors = read_safetensors(tiny_folder / "model.safetensors")
    for name, byte in (
        ("layers.0.attn.wq_a.weight", 0x80),
        ("layers.1.attn.wq_a.weight", 0x7F),
        ("layers.2.attn.wq_a.weight", 0),
        ("layers.3.attn.wq_a.scale", 255),
        ("layers.2.ffn.experts.1.w1.weight", 0x88),
        ("norm.weight", 0x80),
        ("layers.1.engram.embed.weight", 0xFF),
    ):
        tensors[name] = np.full_like(tensors[name].view(np.uint8), byte).view(tensors[name].dtype)
    write_safetensors(path / "model.safetensors", tensors)
    return ReleasedFolder.open(path)


@pytest.fixture(scope="module")
def folder(source, token_map, tmp_path_factory):
    """Written from the parameters in storage form, Engram tables straight from the source."""
    path = tmp_path_factory.mktemp("orbax") / "model"
    save_orbax(load_params(source, RELEASED, engram="host"), source.config, path, source=source, token_map=token_map)
    return path


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def assert_same_leaves(found, expected):
    found, expected = dict(flatten(found)), dict(flatten(expected))
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        a, b = np.asarray(found[path]), np.asarray(leaf)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def test_layout(folder, source):
    assert {p.name for p in folder.parent.iterdir()} == {"model"}
    assert {p.name for p in folder.iterdir()} == {"config.json", "params", ENGRAM_FILE, "token_map.npy"}
    assert (folder / "config.json").read_bytes() == (source.path / "config.json").read_bytes()
    tables = read_safetensors(folder / ENGRAM_FILE)
    assert set(tables) == {n for n in source.entries if ".engram.embed." in n}
    for name, value in tables.items():
        assert value.tobytes() == source.read(name).tobytes()


def test_a_chunk_lies_in_one_released_tensor(folder, source):
    """So a converter can write released tensors one by one."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder / "params").item_metadata.tree
    leaves = name_map(source.config).leaves
    for path, leaf in flatten(tree):
        n = len(leaves[path].stack)
        assert leaf.storage.chunk_shape == (1,) * n + leaf.shape[n:], path


def test_every_released_tensor_keeps_its_bytes(folder, source):
    opened = OrbaxFolder.open(folder)
    for name in opened.reading_order(source.entries):
        value = source.read(name)
        found = opened.rows(name, 0, len(value))
        assert found.dtype == value.dtype and found.tobytes() == value.tobytes(), name
        assert opened.rows(name, 1, 3).tobytes() == value[1:3].tobytes()


@pytest.mark.parametrize("batch_bytes", [1 << 30, 100_000])
def test_released_numerics_restore_the_same_leaves(folder, source, batch_bytes, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", batch_bytes)
    opened = OrbaxFolder.open(folder)
    assert (max(opened._batch_of.values()) > 3) == (batch_bytes == 100_000)
    reports = []
    found = load_params(opened, RELEASED, progress=lambda *n: reports.append(n))
    assert_same_leaves(found, load_params(source, RELEASED))
    assert reports[-1][0] == reports[-1][1] == sum(e.nbytes for e in source.entries.values())


def test_other_numerics_and_storages_restore_as_from_the_released_folder(tiny_folder, tmp_path):
    plain = ReleasedFolder.open(tiny_folder)
    save_orbax(load_params(plain, RELEASED), plain.config, tmp_path / "model")
    opened = OrbaxFolder.open(tmp_path / "model")
    for numerics, storage in ((FLOAT32, "fp4"), (NOQUANT, "fp8"), (NOQUANT, "bf16")):
        expected = load_params(plain, numerics, expert_storage=storage)
        assert_same_leaves(load_params(opened, numerics, expert_storage=storage), expected)
    # Saved from float32, the folder holds the storage form again, with the same values.
    expected = load_params(plain, FLOAT32)
    save_orbax(expected, plain.config, tmp_path / "again")
    assert_same_leaves(load_params(OrbaxFolder.open(tmp_path / "again"), FLOAT32), expected)


def test_back_to_the_released_format(folder, source, tmp_path):
    opened = OrbaxFolder.open(folder)
    save_released(load_params(opened, RELEASED, engram="mmap"), opened.config, tmp_path / "out", source=opened)
    found, expected = (read_safetensors(p / "model.safetensors") for p in (tmp_path / "out", source.path))
    assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in expected.items()}
    assert (tmp_path / "out/token_map.npy").read_bytes() == (folder / "token_map.npy").read_bytes()


def test_load_takes_an_orbax_folder_in_any_placement(folder, source, token_map):
    ids = np.random.default_rng(0).integers(0, source.config.engram_num_embeddings[0], (2, 7))
    layer = source.config.engram_layer_ids[0]
    expected = source.engram_table(layer, "host").rows(ids)
    for place in ("device", "host", "mmap"):
        model = ds.load(folder, engram=place)
        assert ("embed" in model.params["engram"][f"l{layer}"]) == (place == "device")
        assert model.tokenizer is None and model.config == source.config
        if place != "device":
            table = OrbaxFolder.open(folder).engram_table(layer, place)
            np.testing.assert_array_equal(table.rows(ids).view(np.uint16), expected.view(np.uint16))
    with pytest.raises(ValueError, match="not 'device'"):
        OrbaxFolder.open(folder).engram_table(layer, "device")
    np.testing.assert_array_equal(np.load(folder / "token_map.npy"), token_map)


def test_tokenizer_files_come_along_and_replace_the_token_map(tmp_path, token_map):
    demo = ds.load("demo")
    origin = ReleasedFolder.open(ds.load.__globals__["_find"]("demo", None))
    save_orbax(demo.params, demo.config, tmp_path / "model", tokenizer=origin.path, token_map=token_map)
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names and "token_map.npy" not in names
    assert ds.load(tmp_path / "model").tokenizer.encode("The harbour") == demo.tokenizer.encode("The harbour")


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(path, *parts):
    with pytest.raises(CheckpointError) as error:
        load_params(OrbaxFolder.open(path), RELEASED)
    for part in (str(path), *parts):
        assert part in str(error.value), str(error.value)


def test_incomplete_folders(folder, tmp_path, token_map):
    path = copied(folder, tmp_path)
    for name, parts in (("config.json", ("config.json", "cannot be read")), (ENGRAM_FILE, ("cannot be read",))):
        (path / name).rename(tmp_path / name)
        refused(path, name, *parts)
        (tmp_path / name).rename(path / name)
    for name in ("_METADATA", "manifest.ocdbt"):
        (path / "params" / name).rename(tmp_path / name)
        refused(path, "params", "convert the model again")
        (tmp_path / name).rename(path / "params" / name)
    opened = OrbaxFolder.open(path)
    for file in (path / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-1000])
    refused(path, "params", "is not a complete Orbax checkpoint (its metadata cannot be read)")
    with pytest.raises(CheckpointError, match="incomplete or damaged: convert the model again"):
        load_params(opened, RELEASED)
    shutil.rmtree(path / "params")
    with pytest.raises(CheckpointError, match="neither"):
        ds.load(path, token_map=token_map)


def test_foreign_folders(folder, golden, tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "raw", {"a": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="an Orbax checkpoint of something else"):
        ds.load(tmp_path / "raw")
    path = copied(folder, tmp_path)
    shutil.rmtree(path / "params")
    shutil.copytree(tmp_path / "raw", path / "params")
    refused(path, "problems:", "missing; config.json implies", "... and")
    shutil.rmtree(path / "params")
    shutil.copytree(folder / "params", path / "params")
    config = json.loads((golden / "tinyA_config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 96
    (path / "config.json").write_text(json.dumps(config))
    refused(path, "layers.ffn.experts.w1.weight: uint8 [", "but config.json implies uint8 [")


def test_a_released_folder_stays_one_whatever_lies_beside(tiny_folder, tmp_path):
    path = shutil.copytree(tiny_folder, tmp_path / "model")
    (path / "params").mkdir()
    assert isinstance(open_folder(path), ReleasedFolder)


def test_saving_refuses_before_it_writes(source, folder, tmp_path):
    params = load_params(source, RELEASED, engram="mmap")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        save_orbax(params, source.config, tmp_path / "taken", source=source)
    with pytest.raises(CheckpointError, match="give the folder it was loaded from"):
        save_orbax(params, source.config, tmp_path / "new")
    for wrong in (np.zeros(3, np.int32), np.zeros(source.config.vocab_size, np.float32)):
        with pytest.raises(CheckpointError, match="one integer for each"):
            save_orbax(params, source.config, tmp_path / "new", source=source, token_map=wrong)
    values = dict(flatten(load_params(source, FLOAT32)))
    assert jax.tree.leaves(values)  # holds NaN: the source has NaN codes
    with pytest.raises(CheckpointError, match="not finite"):
        save_orbax(module.nest(values), source.config, tmp_path / "new")
    assert {p.name for p in tmp_path.iterdir()} == {"taken"}
