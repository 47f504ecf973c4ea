"""`launch/verify.py`: a whole folder is ok; every kind of damage is a problem that is named; memory stays bounded."""

import json
import re
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint import finite, first_layers, probes, verify
from dsv41_jax.checkpoint.finite import check_tensors, not_finite, plan
from dsv41_jax.checkpoint.manifest import iter_tensors
from dsv41_jax.checkpoint.probes import check_probes, is_released
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import CheckpointError, read_header
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_map import layer_map
from launch.verify import main
from oracle_weights import read_safetensors, write_safetensors


@pytest.fixture(scope="module")
def tensors(golden):
    return read_safetensors(golden / "tinyA_model.safetensors")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


def run(capsys, *argv):
    """(exit code, lines) of the command."""
    code = main([str(a) for a in argv])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def damaged(folder, tensors, **changes):
    """The tiny model with some tensors changed: a function of the array, or None to leave it out."""
    tensors = dict(tensors)
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name].copy() if name in tensors else None)
    write_safetensors(folder / "model.safetensors", tensors)


def with_byte(position, byte):
    def change(array):
        array.reshape(-1).view(np.uint8)[position] = byte
        return array

    return change


def test_a_whole_model_is_ok(folder, golden, capsys):
    np.save(folder / "token_map.npy", np.load(golden / "tinyA_token_map.npz")["token_map"])
    code, text = run(capsys, folder, "--layers=3")
    assert code == 0 and "verdict: ok" in text
    for words in (
        "all in order",
        "missing 0, unexpected 0, wrong shape 0, wrong dtype 0, twice 0",
        "(100%), all finite",
    ):
        assert words in text
    assert "published bytes: not applicable" in text and "numbers: 100%" in text
    found = re.findall(r"layer (\d): stream: rms ([\d.]+), max ([\d.]+), zeros ([\d.]+)%; .* (\d+) experts", text)
    assert [int(f[0]) for f in found] == [0, 1, 2]
    assert all(0 < float(rms) < float(largest) for _, rms, largest, _, _ in found)
    assert "after layer 2: rms" in text


def test_the_first_layers_are_those_of_the_whole_model(tiny_folder, golden):
    """Cut down, every layer keeps its place in the layer-share map."""
    config = ModelConfig.from_json(tiny_folder)
    for layers in range(1, config.num_hidden_layers + 1):
        cut = first_layers.cut_config(config, layers)
        for a, b in zip(layer_map(cut), layer_map(config), strict=False):
            for field in ("mode", "ratio", "main_kv_from", "index_from", "pool", "engram"):
                assert getattr(a, field) == getattr(b, field), (layers, b.layer, field)
    ids = first_layers.fixed_tokens(config)
    assert ids.dtype == np.int32 and ids[0, 0] == config.bos_token_id and len(np.unique(ids)) == ids.size


def test_census_names_every_kind(folder, tensors, capsys):
    changes = {
        "layers.0.attn.wkv.scale": None,
        "norm.weight": lambda a: a[:64],
        "layers.1.attn.attn_sink": lambda a: a.astype(ml_dtypes.bfloat16),
        "layers.0.attn.surprise": lambda _: np.zeros(3, np.float32),
        "model.layers.0.attn_norm.weight": lambda _: tensors["layers.0.attn_norm.weight"],
        "mtp.0.embed.weight": lambda _: np.zeros((2, 2), np.float32),
    }
    damaged(folder, tensors, **changes)
    code, text = run(capsys, folder, "--layers=0")
    assert code == 1 and "verdict: 5 problems" in text
    assert "missing 1, unexpected 1, wrong shape 1, wrong dtype 1, twice 1" in text
    assert "1 draft copies of embed and head" in text and "first layers: not run" in text
    for name in list(changes)[:-1]:
        assert f"problem: {name}" in text, name


def test_long_lists_are_cut(folder, tensors, capsys):
    write_safetensors(folder / "model.safetensors", {n: v for n, v in tensors.items() if ".experts." not in n})
    code, text = run(capsys, folder, "--layers=1")
    missing = sum(".experts." in name for name in tensors)
    assert code == 1 and f"missing {missing}," in text and f"... and {missing - verify.SHOWN} more" in text
    assert text.count("problem: ") == verify.SHOWN
    assert "first layers: not run, because layers.0.ffn.experts.0.w1" in text and f"verdict: {missing} problems" in text


def test_files_that_are_not_whole(folder, capsys):
    config = (folder / "config.json").read_text()
    (folder / "spare.safetensors").write_bytes(b"short")
    code, text = run(capsys, folder, "--layers=0")
    assert code == 1 and "spare.safetensors" in text and "truncated" in text and "missing 0" in text
    for name, words in (("spare.safetensors", ""), ("model.safetensors", "neither"), ("config.json", "cannot be read")):
        (folder / name).unlink()
        if words:
            code, text = run(capsys, folder, "--layers=0")
            assert code == 1 and words in text and "verdict:" in text
    (folder / "params").mkdir()
    assert "config.json: cannot be read" in run(capsys, folder)[1]
    (folder / "config.json").write_text(config)
    code, text = run(capsys, folder)
    assert code == 1 and "Orbax folder, and not in order" in text and "is not a complete Orbax checkpoint" in text
    assert run(capsys, folder / "nowhere") == (1, f"verify: {folder / 'nowhere'}: no such folder\n")
    for flag in ("--layers=-1", "--sample=0", "--sample=1.5"):
        assert run(capsys, folder, flag)[0] == 1


@pytest.mark.parametrize(
    ("name", "position", "byte"),
    [
        ("layers.2.attn.wq_a.weight", 777, 0x7F),
        ("layers.2.attn.wq_a.weight", 777, 0xFF),
        ("layers.1.engram.embed.weight", 777, 0x7F),
        ("layers.2.ffn.experts.1.w2.scale", 3, 255),
        ("head.weight", 1001, 0x7F),
        ("layers.1.ffn.gate.bias", 7, 0x7F),
    ],
)
def test_numbers_that_are_none(folder, tensors, name, position, byte, capsys):
    def change(array):
        flat = array.reshape(-1).view(np.uint8)
        flat[position] = byte
        if array.dtype.itemsize > 1:
            flat[position - 1] = 0x80  # the exponent's last bit
        return array

    damaged(folder, tensors, **{name: change})
    code, text = run(capsys, folder, "--layers=0")
    row = position // (tensors[name].nbytes // len(tensors[name]))
    assert code == 1 and "verdict: 1 problem\n" in text
    assert f"{name} in model.safetensors: 1 values are not numbers, the first in row {row}" in text


def test_not_finite_by_format():
    every = np.arange(256, dtype=np.uint8)
    assert np.flatnonzero(not_finite(every.view(ml_dtypes.float8_e4m3fn), "F8_E4M3")).tolist() == [0x7F, 0xFF]
    assert np.flatnonzero(not_finite(every.view(ml_dtypes.float8_e8m0fnu), "F8_E8M0")).tolist() == [255]
    assert not not_finite(every.view(np.int8), "I8").any()
    for dtype, name in ((ml_dtypes.bfloat16, "BF16"), (np.float32, "F32")):
        values = np.array([0, 1, -np.inf, np.nan, 3e38, np.inf], dtype)
        np.testing.assert_array_equal(not_finite(values, name), ~np.isfinite(values.astype(np.float64)))


def test_holes_are_noted(folder, tensors, capsys):
    damaged(folder, tensors, **{"layers.2.ffn.experts.1.w2.weight": np.zeros_like})
    code, text = run(capsys, folder, "--layers=0")
    assert code == 0 and "note: 1 quantised weights are zero" in text and "layers.2.ffn.experts.1.w2.weight" in text


def test_broken_layers_are_seen_in_the_run(folder, tensors, golden, capsys):
    """A scale of 2^127 is a number, but what it makes of the streams is none."""
    np.save(folder / "token_map.npy", np.load(golden / "tinyA_token_map.npz")["token_map"])
    damaged(
        folder, tensors, **{"layers.0.attn.wo_b.scale": lambda a: np.full_like(a.view(np.uint8), 254).view(a.dtype)}
    )
    code, text = run(capsys, folder, "--layers=3")
    assert code == 1 and "all finite" in text and "first layers, layer 1: stream is not finite" in text


def test_without_a_tokenizer_layers_before_the_first_engram_run(folder, capsys):
    first = min(ModelConfig.from_json(folder).engram_layer_ids)
    code, text = run(capsys, folder, "--layers=1")
    assert code == 0
    assert ("first layers: 1 run" in text) == (first > 0)


# --- published bytes -------------------------------------------------------------------------------------------------


def test_published_bytes(golden, tmp_path):
    q = np.load(golden / "quant.npz")
    codes = np.zeros((32, 64), np.uint8)
    codes[0, :32] = q["probe_fp8.codes__e4m3"]
    packed = np.zeros((2, 32), np.uint8)
    packed[0, :16] = q["probe_fp4.packed__fp4x2"]
    e4m3, e8m0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
    tensors = {
        "layers.0.attn.wkv.weight": codes.view(e4m3),
        "layers.0.attn.wkv.scale": np.array([[q["probe_fp8.scale__e8m0"][0], 9]], np.uint8).view(e8m0),
        "layers.0.ffn.experts.0.w1.weight": packed.view(np.int8),
        "layers.0.ffn.experts.0.w1.scale": np.array([[q["probe_fp4.scale__e8m0"][0], 9]] * 2, np.uint8).view(e8m0),
    }
    write_safetensors(tmp_path / "a.safetensors", tensors)
    assert check_probes(read_header(tmp_path / "a.safetensors")[0]) == []
    for name in tensors:
        changed = tensors | {name: with_byte(0, 1)(tensors[name].copy())}
        write_safetensors(tmp_path / "b.safetensors", changed)
        (problem,) = check_probes(read_header(tmp_path / "b.safetensors")[0])
        assert problem.startswith(name) and "published is" in problem
    assert len(check_probes({})) == len(probes.PROBES)


def test_probes_are_for_the_released_configuration(golden, tmp_path, capsys):
    mapping = json.loads((golden / "released_config.json").read_text())
    assert is_released(ModelConfig.from_json(mapping))
    assert is_released(ModelConfig.from_json(mapping | {"transformers_version": "6"}))
    mapping["text_config"]["routed_scaling_factor"] = 2.5
    assert not is_released(ModelConfig.from_json(mapping))
    # Of a folder with the released configuration and next to nothing else, nearly everything is missing.
    shutil.copy(golden / "released_config.json", tmp_path / "config.json")
    write_safetensors(tmp_path / "model.safetensors", {"norm.weight": np.ones(5120, ml_dtypes.bfloat16)})
    code, text = run(capsys, tmp_path)
    assert code == 1 and "the released DeepSeek-V4.1-Flash; 40 layers" in text
    assert "96085 tensors implied, 1 as implied; missing 96084" in text
    assert "published bytes: 2 tensors compared, not equal" in text and "verdict: 96086 problems" in text


# --- memory and samples ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sparse(golden, tmp_path_factory):
    """A folder of some 300 MB that take no room on the disk: all zeros, one NaN code near the end."""
    path = tmp_path_factory.mktemp("sparse")
    mapping = json.loads((golden / "tinyA_config.json").read_text())
    mapping["text_config"] |= {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 16}
    config = ModelConfig.from_json(mapping)
    config.write(path)
    header, position = {}, 0
    for spec in iter_tensors(config):
        offsets = [position, position := position + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
    raw = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    folder = ReleasedFolder.open(path)
    entry = folder.entries["layers.7.ffn.shared_experts.w2.weight"]
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(entry.offset + 5 * 1024 + 17)
        file.write(b"\x7f")
    return path


def test_memory_is_bounded(sparse):
    size = (sparse / "model.safetensors").stat().st_size
    assert size > 250e6
    lines = []
    tracemalloc.start()
    try:
        assert verify.verify(sparse, layers=0, write=lines.append) == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80e6, f"{peak / 1e6:.0f} MB"
    assert "layers.7.ffn.shared_experts.w2.weight in model.safetensors: 1 values" in "\n".join(lines)
    assert "first in row 5" in "\n".join(lines)


def test_a_sample_is_an_even_share(sparse, monkeypatch):
    monkeypatch.setattr(finite, "CHUNK_BYTES", 1 << 18)
    entries = ReleasedFolder.open(sparse).entries
    whole, total = plan(entries, 1.0)
    assert total == sum(entry.nbytes for entry in entries.values()) and len(whole) == len(entries)
    part, nbytes = plan(entries, 0.1)
    assert 0.07 < nbytes / total < 0.13
    read = list(check_tensors(entries, part[:20], lambda n: None))
    assert [check.name for check in read] == [name for name, _ in part[:20]]
    assert all(0 <= start < stop <= entries[name].shape[0] for name, ranges in part for start, stop in ranges)


def test_bytes_that_cannot_be_read_are_a_problem(folder, monkeypatch):
    entries = ReleasedFolder.open(folder).entries

    def read_rows(entry, start, stop):
        raise CheckpointError(f"{entry.name}: the disk is broken")

    monkeypatch.setattr(finite, "read_rows", read_rows)
    lines = []
    assert verify.verify(folder, layers=0, write=lines.append) == len(entries)
    assert "layers.0.attn.attn_sink in model.safetensors: cannot be read: " in "\n".join(lines)
