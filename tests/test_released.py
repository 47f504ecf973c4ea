"""Loading a released-format folder: every tensor lands where it belongs, in every form, within a bounded memory."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax import quant
from dsv41_jax.checkpoint import destination, safetensors_file, storage
from dsv41_jax.checkpoint.destination import Destination
from dsv41_jax.checkpoint.manifest import iter_tensors
from dsv41_jax.checkpoint.names import by_released_name, name_map
from dsv41_jax.checkpoint.released import CheckpointError, ReleasedFolder, abstract_params, load_params
from dsv41_jax.checkpoint.safetensors_file import DTYPES, read, read_header, write_file
from dsv41_jax.checkpoint.storage import to_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_layout import derive_layout
from dsv41_jax.numerics import FLOAT32, NOQUANT, QUANTIZED_TRAINING, RELEASED
from oracle_weights import dequantise, dequantise_one, read_safetensors, write_safetensors

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def tiny_folder(golden, path):
    path.mkdir(exist_ok=True)
    shutil.copy(golden / "tinyA_config.json", path / "config.json")
    shutil.copy(golden / "tinyA_model.safetensors", path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    return ReleasedFolder.open(tiny_folder(golden, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def stored(golden):
    return read_safetensors(golden / "tinyA_model.safetensors")


def by_name(params, folder):
    """{released name: numpy array} of a loaded pytree."""
    on_host = jax.tree.map(np.asarray, params)
    return by_released_name(on_host, folder.config)


def assert_same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def test_stored_forms_keep_every_byte(folder, stored, monkeypatch):
    asked, plain, reports = [], os.preadv, []
    monkeypatch.setattr(safetensors_file.os, "preadv", lambda f, b, o: asked.append(sum(map(len, b))) or plain(f, b, o))
    found = by_name(load_params(folder, RELEASED, progress=lambda *n: reports.append(n)), folder)
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert_same(found[name], value.view(np.uint8) if value.dtype == np.int8 else value)
    # Each byte once, the drafts' too (pitfall 43).
    payload = sum(value.nbytes for value in stored.values())
    assert sum(asked) == payload
    assert reports[-1] == (payload, payload) and reports == sorted(reports) and len(reports) == len(stored)


@pytest.mark.parametrize("numerics", [FLOAT32, QUANTIZED_TRAINING], ids=lambda n: n.name)
def test_float32_dequantises_everything(folder, stored, numerics):
    params = load_params(folder, numerics)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    found, expected = by_name(params, folder), dequantise(stored)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(("experts", "dtype"), [("fp8", E4M3), ("bf16", ml_dtypes.bfloat16)])
def test_expert_storage_keeps_the_values(folder, stored, experts, dtype):
    found = by_name(load_params(folder, NOQUANT, expert_storage=experts), folder)
    for name, value in stored.items():
        scale_name = name.removesuffix("weight") + "scale"
        if value.dtype == np.int8:
            assert found[name].dtype == dtype
            scale = found.get(scale_name)
            assert (scale is None) == (experts == "bf16")
            np.testing.assert_array_equal(
                dequantise_one(found[name], scale), dequantise_one(value, stored[scale_name]), err_msg=name
            )
        elif name in found:
            assert_same(found[name], value)
    lost = stored.keys() - found.keys()
    assert len(lost) == (0 if experts == "fp8" else sum(".experts." in n and n.endswith("scale") for n in stored))


@pytest.mark.parametrize(
    ("numerics", "experts"), [(RELEASED, "fp4"), (RELEASED, "fp8"), (NOQUANT, "bf16"), (FLOAT32, "fp4")]
)
@pytest.mark.parametrize("engram", ["device", "mmap"])
def test_abstract_params_predict_the_pytree(folder, numerics, experts, engram):
    found = load_params(folder, numerics, expert_storage=experts, engram=engram)
    expected = abstract_params(folder.config, numerics, expert_storage=experts, engram=engram)
    as_struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found)
    assert as_struct == expected


def test_released_pytree_without_weights(golden):
    """The full-size pytree from the configuration alone: payload bytes, and the names of the interface."""
    config = ModelConfig.from_json(golden / "released_config.json")
    params = abstract_params(config, RELEASED)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) == 510_286_023_000
    assert params["layers"]["ffn"]["experts"]["w1"]["weight"].shape == (40, 384, 2304, 2560)
    assert params["layers"]["ffn"]["experts"]["w1"]["weight"].dtype == np.uint8
    assert params["layers"]["attn"]["wo_a"]["scale"].shape == (40, 256, 128)
    assert params["mtp"]["layers"]["hc_attn"]["fn"].shape == (3, 24, 20480)
    assert params["engram"]["l14"]["embed"]["weight"].shape == (384_016_682, 256)
    assert "embed" not in abstract_params(config, RELEASED, engram="host")["engram"]["l14"]


def test_engram_tables_off_the_device(folder, stored):
    on_device = load_params(folder, FLOAT32)
    for place in ("host", "mmap"):
        params = load_params(folder, RELEASED, engram=place)
        for layer, rows in zip(folder.config.engram_layer_ids, folder.config.engram_num_embeddings, strict=True):
            assert set(params["engram"][f"l{layer}"]) == {"wkv", "q_weight", "k_weight"}
            table = folder.engram_table(layer, place, np.float32)
            ids = np.array([[0, rows - 1], [7, 7]])
            expected = np.asarray(on_device["engram"][f"l{layer}"]["embed"]["weight"])[ids]
            np.testing.assert_array_equal(table.rows(ids), expected)


def test_unknown_choices_are_refused(folder):
    for choice, message in (
        ({"engram": "disk"}, "engram='disk'.*device, host, mmap"),
        ({"expert_storage": "int4"}, "expert_storage='int4'.*fp4, fp8, bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            load_params(folder, RELEASED, **choice)
        with pytest.raises(ValueError, match=message):
            abstract_params(folder.config, RELEASED, **choice)
    with pytest.raises(ValueError, match="'device'"):
        folder.engram_table(1, "device")


def test_blocks_of_rows_on_the_device_give_the_same(folder, monkeypatch):
    """Large leaves go another way than small ones: several blocks per tensor, written into a leaf on the device."""
    wanted = load_params(folder, FLOAT32), load_params(folder, RELEASED)
    monkeypatch.setattr(destination, "SMALL_LEAF_BYTES", 100_000)
    monkeypatch.setattr(destination, "_IN_FLIGHT_BYTES", 10_000)
    monkeypatch.setattr(storage, "BLOCK_ELEMENTS", 1 << 12)
    for expected, numerics in zip(wanted, (FLOAT32, RELEASED), strict=True):
        jax.tree.map(assert_same, *(jax.tree.map(np.asarray, t) for t in (load_params(folder, numerics), expected)))


@pytest.mark.parametrize(
    "dtype", [E4M3, E8M0, ml_dtypes.bfloat16, np.float32, np.uint8], ids=lambda d: np.dtype(d).name
)
def test_leaves_are_filled_in_place(dtype):
    """One allocation from first to last, and no work that grows with the leaf: no second copy, no conversion of it."""
    path, shape = ("a",), (4, 8, 64, 1024)
    where = Destination({path: (shape, np.dtype(dtype))})
    piece = where._buffers[path].pieces[0]
    pointer = piece.array.unsafe_buffer_pointer()
    rng = np.random.default_rng(0)
    values = rng.integers(0, 120, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
    for index in np.ndindex(4, 8):
        where.put(path, index, 0, values[index][:32])
        where.put(path, index, 32, values[index][32:])
        assert piece.array.unsafe_buffer_pointer() == pointer
    leaf = where.finish()[path]
    assert leaf.unsafe_buffer_pointer() == pointer
    assert_same(np.asarray(leaf), values)
    block = jnp.zeros((1, 1, 32, 1024), destination._carrier(np.dtype(dtype)))
    target = jax.ShapeDtypeStruct(shape, block.dtype)
    compiled = destination._update.lower(target, block, (np.int32(0),) * 4).compile()
    assert "convert" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 16


def test_destination_refuses_gaps_and_knows_its_shards():
    where = Destination({("a",): ((2, 3), np.dtype(np.float32))})
    where.put(("a",), (0,), 0, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="a: 3 values"):
        where.finish()

    class FirstHalf:
        """What another host's sharding looks like: only some rows are here."""

        def addressable_devices_indices_map(self, shape):
            return {jax.devices()[0]: (slice(0, 40), slice(None))}

    where = Destination({("a",): ((80, 3), np.dtype(np.float32))}, lambda path: FirstHalf())
    for rows, wanted in (((0, 80), (0, 64)), ((32, 50), (32, 50)), ((39, 41), (39, 41)), ((0, 32), (0, 32))):
        assert where.wanted(("a",), (), rows) == wanted  # whole blocks of 32 rows, which share scales
    assert where.wanted(("a",), (), (40, 80)) == (40, 40)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from dsv41_jax.checkpoint import destination, storage
from dsv41_jax.checkpoint.released import ReleasedFolder, load_params
from dsv41_jax.numerics import RELEASED

folder = ReleasedFolder.open(sys.argv[1])
plain = load_params(folder, RELEASED)
destination.SMALL_LEAF_BYTES, storage.BLOCK_ELEMENTS = 30_000, 1 << 12
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
rules = {
    "layers.ffn.experts.": P(None, ("x", "y")),
    "mtp.layers.ffn.experts.": P(None, "y"),
    "embed.": P("x"),
    "layers.attn.wq_b.weight": P(None, None, "y"),
    "engram.l4.embed.": P(("x", "y")),
    "norm.": P(),
}
placement = lambda path: next((NamedSharding(mesh, p) for k, p in rules.items() if path.startswith(k)), None)
params = load_params(folder, RELEASED, placement=placement)
for (key, a), (_, b) in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves_with_path(params), strict=True):
    wanted = placement(".".join(k.key for k in key))
    assert wanted is None or b.sharding == wanted, key
    assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), key
try:
    load_params(folder, RELEASED, placement=lambda path: NamedSharding(mesh, P(("x", "y"))))
except ValueError as error:
    print(str(error).split(":")[0])
print("equal", len(jax.devices()))
"""


def run(script, *arguments, **environment):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_shards_on_eight_devices(folder):
    printed = run(SHARDED, folder.path, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert printed.split() == ["params.layers.attn_norm.weight", "equal", "8"]


# Stored bytes on the way in (pitfalls 3 to 7), through a file.


def through_a_file(tmp_path, weight, scale):
    write_safetensors(tmp_path / "w.safetensors", {"weight": weight, "scale": scale})
    entries, _ = read_header(tmp_path / "w.safetensors")
    return read(entries["weight"]), read(entries["scale"])


def scale_of_bytes(codes):
    return np.array(codes, np.uint8).view(E8M0)


def test_scales_are_per_block_of_32(tmp_path):
    """Pitfalls 3, 4 and 5: code 0x38 is 1.0, scale byte 120 is 2^-7, each 32x32 block has its own."""
    weight = np.full((64, 64), 0x38, np.uint8).view(E4M3)
    found = to_params(*through_a_file(tmp_path, weight, scale_of_bytes([[120, 127], [128, 130]])), np.dtype(np.float32))
    expected = np.kron(np.array([[2.0**-7, 1], [2, 8]]), np.ones((32, 32)))
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_fp4_to_fp8_is_exact_where_scales_differ(tmp_path):
    """Pitfall 7: a 1x32 group 2^17 smaller than its neighbours keeps its values, because it keeps its scale."""
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(2, 128), (32, 1)).view(np.int8)
    codes = np.full((64, 8), 127)
    codes[:, 3] = 110
    weight, scale = through_a_file(tmp_path, packed, scale_of_bytes(codes))
    as_fp8 = to_params(weight, scale, np.dtype(E4M3))
    expected = dequantise_one(packed, scale)
    np.testing.assert_array_equal(dequantise_one(as_fp8, scale), expected)
    leaf = {"weight": as_fp8, "scale": scale}
    np.testing.assert_array_equal(quant.dequantize_weight(leaf, jnp.float32), expected.astype(np.float32))
    assert np.abs(expected[:, 96:128]).max() == 6 * 2.0**-17
    for dtype in (ml_dtypes.bfloat16, np.float32):
        np.testing.assert_array_equal(to_params(weight, scale, np.dtype(dtype)).astype(np.float64), expected)


@pytest.mark.parametrize(("numerics", "experts"), [(RELEASED, "fp8"), (RELEASED, "bf16"), (FLOAT32, "fp4")])
def test_scale_byte_255_is_refused_by_name(golden, tmp_path, stored, numerics, experts):
    path, name = tiny_folder(golden, tmp_path), "layers.2.ffn.experts.3.w2.scale"
    scale = stored[name].view(np.uint8).copy()
    scale[5, 1] = 255
    write_safetensors(path / "model.safetensors", stored | {name: scale.view(E8M0)})
    broken = ReleasedFolder.open(path)
    with pytest.raises(CheckpointError, match=f"model.safetensors: {name}: holds the scale byte 255") as error:
        load_params(broken, numerics, expert_storage=experts)
    assert "expert_storage='fp4'" in str(error.value)
    load_params(broken, RELEASED)


def test_bytes_of_the_real_checkpoint(golden, tmp_path):
    """Row 0 of layers.0.attn.wkv and of the first expert's w1, published, decode as published."""
    q = np.load(golden / "quant.npz")
    fp8 = np.tile(q["probe_fp8.codes__e4m3"], (32, 1)).view(E4M3)
    found = to_params(*through_a_file(tmp_path, fp8, q["probe_fp8.scale__e8m0"][None].view(E8M0)), np.dtype(np.float32))
    np.testing.assert_array_equal(found[0], q["probe_fp8.dequant"])
    for dtype in (np.float32, ml_dtypes.bfloat16, E4M3):
        scale = q["probe_fp4.scale__e8m0"][None].view(E8M0)
        packed = q["probe_fp4.packed__fp4x2"][None].view(np.int8)
        found = to_params(*through_a_file(tmp_path, packed, scale), np.dtype(dtype))
        found = dequantise_one(found, scale if dtype == E4M3 else None)
        np.testing.assert_array_equal(found[0], q["probe_fp4.dequant"])


# Memory.

MEMORY = """
import sys
import jax, numpy as np
from dsv41_jax.checkpoint.released import ReleasedFolder, load_params
from dsv41_jax.numerics import RELEASED

def status(*fields):
    with open("/proc/self/status") as file:
        lines = dict(line.split(":") for line in file)
    return sum(int(lines[f].split()[0]) for f in fields) * 1024

baseline = status("RssAnon", "RssFile")
params = load_params(ReleasedFolder.open(sys.argv[1]), RELEASED)
leaves = jax.block_until_ready(jax.tree.leaves(params))
touched = sum(int(np.asarray(x).reshape(-1).view(np.uint8)[::1024].sum(dtype=np.int64)) for x in leaves)
print(sum(x.nbytes for x in leaves), status("RssAnon", "RssFile") - baseline, status("VmHWM") - baseline, touched)
"""


def gigabyte_config(golden):
    """A legal configuration of about 1 GB, nearly all of it experts, embeddings and one Engram table."""
    mapping = json.loads((golden / "tinyA_config.json").read_text())
    del mapping["vision_config"]
    rows = derive_layout((1,), 4, 120_000, 2, 400).table_rows
    mapping["text_config"] |= {
        "vocab_size": 98304, "hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 4,
        "compress_ratios": [0, 0, 2, 1, 0], "kv_source_layer_ids": [2, 3], "index_source_layer_ids": [2, 3],
        "candidate_source_layer_id": 3, "n_routed_experts": 64, "engram_layer_ids": [1], "engram_vocab_size": 120_000,
        "engram_num_embeddings": list(rows), "engram_head_dim": 128, "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [2], "dspark_n_routed_experts": 8,
    }  # fmt: skip
    return ModelConfig.from_json(mapping)


def test_a_gigabyte_folder_takes_its_own_size_in_memory(golden, tmp_path, monkeypatch):
    """At most 300 MB more than the parameters stay resident (anonymous and file pages), every parameter touched."""
    config = gigabyte_config(golden)
    config.write(tmp_path)
    noise = np.random.default_rng(0).integers(0, 120, 1 << 22, dtype=np.uint8)  # no NaN codes
    specs = {spec.name: spec for spec in iter_tensors(config)}

    def blocks(name):
        for start in range(0, specs[name].nbytes, len(noise)):
            yield noise[: specs[name].nbytes - start].view(DTYPES[specs[name].dtype])

    monkeypatch.setattr(safetensors_file.os, "fsync", lambda file: None)  # nothing here must survive a power cut
    write_file(tmp_path / "model.safetensors", [(s.name, s.dtype, s.shape) for s in specs.values()], blocks)
    try:
        size, resident, peak, touched = map(int, run(MEMORY, tmp_path).split())
    finally:
        (tmp_path / "model.safetensors").unlink()
    assert size == sum(spec.nbytes for spec in specs.values()) > 950e6 and touched > 0
    assert resident <= size + 300e6, f"{resident / 1e6:.0f} MB resident for {size / 1e6:.0f} MB of parameters"
    assert peak <= size + 600e6, f"{peak / 1e6:.0f} MB at the peak for {size / 1e6:.0f} MB of parameters"


def test_name_map_is_made_once(folder):
    assert name_map(folder.config) is name_map(ModelConfig.from_json(folder.path))
