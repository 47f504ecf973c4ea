"""Writing the released format: equal bytes where stored forms are kept, equal values where weights are quantised."""

import importlib.resources
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dsv41_jax import quant
from dsv41_jax.checkpoint import save_released as module
from dsv41_jax.checkpoint.manifest import DTYPE_BYTES
from dsv41_jax.checkpoint.names import flatten, name_map, nest
from dsv41_jax.checkpoint.released import CheckpointError, ReleasedFolder, load_params, save_released
from dsv41_jax.checkpoint.storage import Storage, param_leaves
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import FLOAT32, RELEASED
from oracle_weights import dequantise, dequantise_one, read_safetensors, store_fp4, store_fp8
from random_configs import random_legal_config


@pytest.fixture(scope="module")
def source(golden, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    for name, target in (("tinyA_config.json", "config.json"), ("tinyA_model.safetensors", "model.safetensors")):
        (path / target).write_bytes((golden / name).read_bytes())
    (path / "tokenizer.json").write_text("{}")
    return ReleasedFolder.open(path)


@pytest.fixture(scope="module")
def stored(golden):
    return read_safetensors(golden / "tinyA_model.safetensors")


@pytest.fixture(scope="module")
def released(source):
    return load_params(source, RELEASED)


@pytest.fixture(scope="module")
def float32(source):
    return load_params(source, FLOAT32)


def changed(params, dotted, value):
    """A copy of the pytree with one leaf replaced, or removed with None."""
    leaves = dict(flatten(params))
    path = tuple(dotted.split("."))
    if value is None:
        del leaves[path]
    else:
        leaves[path] = value
    return nest(leaves)


def assert_same_bytes(found, stored):
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def test_stored_forms_are_written_byte_for_byte(source, stored, released, tmp_path):
    reports = []
    save_released(released, source.config, tmp_path / "out", source=source, progress=lambda *n: reports.append(n))
    assert_same_bytes(read_safetensors(tmp_path / "out/model.safetensors"), stored)
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (tmp_path / "out/config.json").read_bytes() == (source.path / "config.json").read_bytes()
    assert reports[-1][0] == reports[-1][1] == sum(value.nbytes for value in stored.values())
    assert ReleasedFolder.open(tmp_path / "out").entries.keys() == source.entries.keys()


def test_shards_and_index(source, stored, released, tmp_path):
    save_released(released, source.config, tmp_path / "out", shard_bytes=300_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    found = {}
    for file in files:
        tensors = read_safetensors(tmp_path / "out" / file)
        assert sum(value.nbytes for value in tensors.values()) <= 300_000 or len(tensors) <= 2
        for name in tensors:
            assert index["weight_map"][name] == file
            assert not name.endswith("weight") or name.replace("weight", "scale") in tensors or name not in found
        found |= tensors
    assert_same_bytes(found, stored)
    for name in source.entries:
        scale = name_map(source.config).scale_of(name)
        assert scale is None or index["weight_map"][scale] == index["weight_map"][name]
    assert not (tmp_path / "out/tokenizer.json").exists()
    again = load_params(ReleasedFolder.open(tmp_path / "out"), RELEASED)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, t) for t in (again, released)))


def header_of(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length, len(raw)


@pytest.mark.parametrize("model", ["tiny", "demo"])
@pytest.mark.parametrize("shard_bytes", [1 << 40, 1_000_000])
def test_load_and_save_keep_bytes_and_conventions(source, model, shard_bytes, tmp_path):
    """Every tensor's bytes; the format's own library reads the files; headers and index as the release has them."""
    if model == "demo":
        source = ReleasedFolder.open(importlib.resources.files("dsv41_jax") / "demo_model")
    save_released(
        load_params(source, RELEASED), source.config, tmp_path / "out", source=source, shard_bytes=shard_bytes
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 3) == (shard_bytes == 1_000_000)
    found = {}
    for file in files:
        header, start, size = header_of(file)
        assert header.pop("__metadata__") == {"format": "pt"} and start % 8 == 0
        end = 0
        for name, entry in header.items():  # back to back, in header order, aligned
            begin, stop = entry["data_offsets"]
            assert begin == end and begin % DTYPE_BYTES[entry["dtype"]] == 0, name
            end = stop
        assert start + end == size
        with safe_open(file, "np") as opened:
            assert set(opened.keys()) == set(header) and opened.metadata() == {"format": "pt"}
        found |= read_safetensors(file)
    assert_same_bytes(found, {name: source.read(name) for name in source.entries})
    if len(files) == 1:
        assert not (tmp_path / "out/model.safetensors.index.json").exists()
        assert model == "tiny" or files[0].read_bytes() == (source.path / "model.safetensors").read_bytes()
        return
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert list(index) == ["metadata", "weight_map"] and list(index["metadata"]) == ["total_size"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert index["weight_map"].keys() == found.keys()


@pytest.mark.parametrize("form", ["float32", "fp8", "bf16"])
def test_other_forms_keep_the_values(source, stored, float32, form, tmp_path):
    """Quantising what was dequantised gives the same values, and a second time the same bytes."""
    params = float32 if form == "float32" else load_params(source, RELEASED, expert_storage=form)
    save_released(params, source.config, tmp_path / "one")
    found, expected = read_safetensors(tmp_path / "one/model.safetensors"), dequantise(stored)
    assert {n: (v.dtype, v.shape) for n, v in found.items()} == {n: (v.dtype, v.shape) for n, v in stored.items()}
    for name, value in dequantise(found).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    if form == "float32":
        save_released(load_params(ReleasedFolder.open(tmp_path / "one"), FLOAT32), source.config, tmp_path / "two")
        assert_same_bytes(read_safetensors(tmp_path / "two/model.safetensors"), found)


def test_random_master_weights_are_quantised_as_the_release_does(tmp_path):
    """Against the oracle's own quantisers: smallest power of two at least amax/448 or amax/6, per block or per row."""
    config = ModelConfig.from_json(random_legal_config(3))
    rng = np.random.default_rng(0)
    leaves = {
        path: (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 3, (*shape[:-1], 1))).astype(dtype)
        for path, (shape, dtype) in param_leaves(name_map(config), Storage(float32=True)).items()
    }
    save_released(nest(leaves), config, tmp_path / "out")
    found = read_safetensors(tmp_path / "out/model.safetensors")
    names = name_map(config)
    kinds = set()
    for name, spec in names.specs.items():
        place = names.places[name]
        if spec.kind.endswith("_scale"):
            continue
        kinds.add(spec.kind)
        values = leaves[place.path][place.index]
        if spec.kind in ("f32", "bf16"):
            np.testing.assert_array_equal(found[name], values.astype(found[name].dtype))
            continue
        store = {"fp4": store_fp4, "fp8": store_fp8, "table": lambda v: store_fp8(v, 1)}[spec.kind]
        weight, scale = store(values.astype(np.float64))
        assert found[names.scale_of(name)].tobytes() == scale.tobytes(), name
        np.testing.assert_array_equal(dequantise_one(found[name], scale), dequantise_one(weight, scale), err_msg=name)
    assert kinds == {"f32", "bf16", "fp8", "fp4", "table"}


@pytest.mark.parametrize("kind", ["fp4", "fp8", "fp8_rows"])
def test_quantising_is_idempotent(kind):
    """For codes and scales a smaller scale could hold too, zero blocks, and large and small scales."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (64, 128), dtype=np.uint8)
    codes[:32, :32] &= 0x11  # small values only: a smaller scale fits
    codes[32:, :32] = 0
    if kind != "fp4":
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # no NaN
    scale = rng.integers(60, 190, (64 if kind != "fp8" else 2, 8 if kind == "fp4" else 4), dtype=np.uint8)
    dtype = np.uint8 if kind == "fp4" else ml_dtypes.float8_e4m3fn
    leaf = {"weight": jnp.asarray(codes.view(dtype)), "scale": jnp.asarray(scale.view(ml_dtypes.float8_e8m0fnu))}

    @jax.jit
    def there_and_back(leaf):
        values = quant.dequantize_weight(leaf, jnp.float32)
        if kind == "fp4":
            weight, scale = quant.quantize_weight_fp4(values)
        else:
            weight, scale = quant.quantize_weight_fp8(values, kind == "fp8_rows")
        return values, quant.dequantize_weight({"weight": weight, "scale": scale}, jnp.float32)

    values, again = there_and_back(leaf)
    np.testing.assert_array_equal(again, values)


def test_engram_tables_come_from_the_source(source, stored, tmp_path):
    params = load_params(source, RELEASED, engram="mmap")
    with pytest.raises(CheckpointError, match="layers.1.engram.embed.weight: params has no leaf .* as source"):
        save_released(params, source.config, tmp_path / "out")
    save_released(params, source.config, tmp_path / "out", source=source)
    assert_same_bytes(read_safetensors(tmp_path / "out/model.safetensors"), stored)


def test_accelerator_arrays_leave_the_device_in_blocks(source, stored, released, tmp_path, monkeypatch):
    """The path of arrays that numpy cannot look into: one compiled slice per leaf shape."""
    sizes = []
    plain = module._slice
    monkeypatch.setattr(module, "_slice", lambda *a: sizes.append(math.prod(a[2])) or plain(*a))
    monkeypatch.setattr(module, "_host_view", lambda leaf: leaf if leaf.ndim > 3 else np.asarray(leaf))
    save_released(released, source.config, tmp_path / "out")
    assert_same_bytes(read_safetensors(tmp_path / "out/model.safetensors"), stored)
    assert len(sizes) == sum(".experts." in name for name in stored) and max(sizes) <= 64 * 64


def test_wrong_parameters_are_refused_before_anything_is_written(source, released, float32, tmp_path):
    bf16 = ml_dtypes.bfloat16
    cases = [
        (changed(released, "norm.weight", None), "norm.weight: params has no leaf norm.weight"),
        (changed(released, "norm.extra", np.zeros(3)), "params.norm.extra: the configuration has no such tensor"),
        (changed(released, "norm.weight", np.zeros(64, bf16)), r"params.norm.weight: bfloat16 \[64\].*\[128\]"),
        (changed(released, "norm.weight", np.zeros(128, np.int32)), "params.norm.weight: int32"),
        (changed(released, "layers.attn.wkv.scale", None), "layers.0.attn.wkv.scale: .* together"),
        (changed(released, "layers.attn.wkv.weight", None), "layers.0.attn.wkv.* together|wkv.weight: params has no"),
        (changed(float32, "layers.attn.wkv.scale", released["layers"]["attn"]["wkv"]["scale"]), "together"),
    ]
    for params, message in cases:
        with pytest.raises(CheckpointError, match=message):
            save_released(params, source.config, tmp_path / "out")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_leave_nothing_behind(source, float32, value, tmp_path):
    for dotted, name in (("layers.attn.wo_b.weight", "layers.3.attn.wo_b.weight"), ("norm.weight", "norm.weight")):
        leaf = np.array(
            float32["norm"]["weight"] if dotted == "norm.weight" else float32["layers"]["attn"]["wo_b"]["weight"]
        )
        leaf[(3, 5, 7) if leaf.ndim == 3 else 5] = value
        with pytest.raises(CheckpointError, match=f"{name}: holds values that are not finite"):
            save_released(changed(float32, dotted, leaf), source.config, tmp_path / "out")
        assert not list(tmp_path.iterdir())


def test_an_occupied_folder_is_left_alone(source, released, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        save_released(released, source.config, tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    (tmp_path / "out/notes.txt").unlink()
    save_released(released, source.config, tmp_path / "out", tokenizer=source.path)
    assert (tmp_path / "out/tokenizer.json").exists()
