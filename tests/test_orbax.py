"""Orbax folders: every byte survives, in any numerics and placement; incomplete and foreign folders are refused."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dsv41_jax as ds
from dsv41_jax.checkpoint import pieces
from dsv41_jax.checkpoint.checksum import crc32, read_checksums
from dsv41_jax.checkpoint.names import flatten, name_map, nest
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.checkpoint.orbax import ENGRAM_FILE, OrbaxFolder, save_orbax
from dsv41_jax.checkpoint.released import CheckpointError, ReleasedFolder, load_params, save_released
from dsv41_jax.model_folder import find_folder
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
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "params",
        ENGRAM_FILE,
        "token_map.npy",
        "checksums.json",
    }
    assert (folder / "config.json").read_bytes() == (source.path / "config.json").read_bytes()
    tables = read_safetensors(folder / ENGRAM_FILE)
    assert set(tables) == {n for n in source.entries if ".engram.embed." in n}
    for name, value in tables.items():
        assert value.tobytes() == source.read(name).tobytes()
    expected = {name: crc32(source.read(name)) for name in source.entries}
    assert read_checksums(folder).tensors == expected


def test_a_chunk_lies_in_one_released_tensor(folder, source):
    """So a converter can write released tensors one by one, and a reader opens those it wants."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder / "params").item_metadata.tree
    leaves = name_map(source.config).leaves
    for path, leaf in flatten(tree):
        n = len(leaves[path].stack)
        assert leaf.storage.chunk_shape == (1,) * n + leaf.shape[n:], path


def test_plain_orbax_restores_it(folder, source):
    expected = nest({p: v for p, v in flatten(load_params(source, RELEASED)) if p[:1] + p[2:3] != ("engram", "embed")})
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(folder / "params")
        assert_same_leaves(found, expected)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
        sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec("x"))
        args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=sharding), expected)
        found = checkpointer.restore(folder / "params", args=ocp.args.PyTreeRestore(restore_args=args))
        assert_same_leaves(found, expected)
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(found))


def test_only_the_chunks_of_the_rows_asked_for_are_read(source, tmp_path, monkeypatch):
    """The other chunks are not even there."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)
    save_orbax(load_params(source, RELEASED), source.config, tmp_path / "model")
    opened = OrbaxFolder.open(tmp_path / "model")
    name = "layers.2.attn.wq_b.weight"
    value, rows = source.read(name), pieces.piece_rows(source_spec := opened.entries[name])
    assert rows * value[0].nbytes <= 2000 < 2 * rows * value[0].nbytes and source_spec.shape[0] > 4 * rows
    for chunk in (tmp_path / "model/params/layers.attn.wq_b.weight").glob("[0-9]*"):
        if chunk.name not in ("2.1.0", "2.2.0"):
            chunk.unlink()
    found = opened.rows(name, rows + 1, 3 * rows - 1)
    assert found.tobytes() == value[rows + 1 : 3 * rows - 1].tobytes()
    for start, stop in ((rows - 1, rows + 1), (3 * rows, 3 * rows + 1)):
        with pytest.raises(CheckpointError, match="layers.2.attn.wq_b.weight cannot be read .NOT_FOUND: chunk"):
            opened.rows(name, start, stop)
    with pytest.raises(IndexError, match="outside shape"):
        opened.rows(name, 0, len(value) + 1)


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": True, "use_zarr3": True}, {"use_ocdbt": False}])
def test_what_orbax_itself_wrote_is_read_too(folder, source, options, tmp_path):
    """Compressed, all tensors of a leaf in one chunk, in every container Orbax has."""
    path = copied(folder, tmp_path)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(path / "params")
    shutil.rmtree(path / "params")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path / "params", ocp.args.PyTreeSave(tree))
    assert (path / "params/manifest.ocdbt").exists() == options.get("use_ocdbt", True)
    opened = OrbaxFolder.open(path)
    for name in source.entries:
        assert opened.rows(name, 0, opened.entries[name].shape[0]).tobytes() == source.read(name).tobytes(), name


def test_every_released_tensor_keeps_its_bytes(folder, source):
    opened = OrbaxFolder.open(folder)
    for name in opened.reading_order(source.entries):
        value = source.read(name)
        found = opened.rows(name, 0, len(value))
        assert found.dtype == value.dtype and found.tobytes() == value.tobytes(), name
        half = len(value) // 2
        assert opened.rows(name, half, len(value)).tobytes() == value[half:].tobytes()


def test_released_numerics_restore_the_same_leaves(folder, source):
    reports = []
    found = load_params(OrbaxFolder.open(folder), RELEASED, progress=lambda *n: reports.append(n))
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
    origin = ReleasedFolder.open(find_folder("demo", None))
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
    for name in ("_METADATA", "layers.attn.wq_a.weight/.zarray"):
        (path / "params" / name).rename(tmp_path / "aside")
        refused(path, "params", "convert the model again")
        (tmp_path / "aside").rename(path / "params" / name)
    chunk = path / "params/layers.attn.wq_a.weight/1.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    refused(path, "layers.1.attn.wq_a.weight cannot be read", "damaged: convert the model again")
    chunk.unlink()
    refused(path, "layers.1.attn.wq_a.weight cannot be read", "missing")
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
        save_orbax(nest(values), source.config, tmp_path / "new")
    assert {p.name for p in tmp_path.iterdir()} == {"taken"}
