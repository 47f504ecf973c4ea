"""Everything that can be wrong with a released-format folder is an error that names it, before any tensor is read."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint import safetensors_file
from dsv41_jax.checkpoint.released_folder import INDEX_FILE, SINGLE_FILE, ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from oracle_weights import read_safetensors, write_safetensors


@pytest.fixture(autouse=True)
def no_tensor_is_read(monkeypatch):
    def refuse(*_):
        raise AssertionError("tensor bytes were read")

    monkeypatch.setattr(safetensors_file.os, "preadv", refuse)


@pytest.fixture(scope="module")
def tensors(golden):
    return read_safetensors(golden / "tinyA_model.safetensors")


@pytest.fixture
def config(golden):
    return json.loads((golden / "tinyA_config.json").read_text())


def single(path, tensors, config):
    path.mkdir(exist_ok=True)
    write_safetensors(path / SINGLE_FILE, tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def sharded(path, tensors, config, n=3):
    """The tensors in n files with an index; returns the folder and the index as a dict."""
    path.mkdir(exist_ok=True)
    files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    weight_map = {name: files[i % n] for i, name in enumerate(tensors)}
    for file in files:
        write_safetensors(path / file, {k: v for k, v in tensors.items() if weight_map[k] == file})
    index = {"metadata": {"total_size": sum(v.nbytes for v in tensors.values())}, "weight_map": weight_map}
    (path / INDEX_FILE).write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config))
    return path, index


def refused(path, *parts):
    with pytest.raises(CheckpointError) as error:
        ReleasedFolder.open(path)
    for part in (str(path), *parts):
        assert part in str(error.value), str(error.value)


def test_single_file_and_shards_open(tmp_path, tensors, config):
    one = ReleasedFolder.open(single(tmp_path / "one", tensors, config))
    three = ReleasedFolder.open(sharded(tmp_path / "three", tensors, config)[0])
    assert one.entries.keys() == three.entries.keys() == tensors.keys()
    assert len({entry.file for entry in three.entries.values()}) == 3
    assert one.config == three.config and one.config.hidden_size == 128  # pitfall 8: read from text_config
    assert "layers.0.attn.wq_a.weight" in one.entries and not any(n.startswith(".") for n in one.entries)


def test_linked_files_open(tmp_path, tensors, config):
    """The layout of a download cache: the folder holds symbolic links to files elsewhere."""
    real, _ = sharded(tmp_path / "blobs", tensors, config)
    (tmp_path / "snapshot").mkdir()
    for file in real.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    ReleasedFolder.open(tmp_path / "snapshot")


def test_older_spellings_and_draft_copies(tmp_path, tensors, config):
    def older(name):
        name = name.replace("wq_a.scale", "wq_a.weight_scale_inv")
        if name.endswith("gate.bias"):
            name = name.replace("gate.bias", "gate.e_score_correction_bias")
        if not name.startswith("vision."):
            name = name.replace(".attn.", ".self_attn.").replace(".ffn.", ".mlp.")
        return "model." + name

    old = {older(name): value for name, value in tensors.items()}
    old["mtp.0.embed.weight"] = old["model.mtp.2.head.weight"] = np.zeros((2, 2), np.float32)
    folder = ReleasedFolder.open(single(tmp_path / "old", old, config))
    assert folder.entries.keys() == tensors.keys()
    assert set(folder.ignored) == {"mtp.0.embed.weight", "model.mtp.2.head.weight"}
    assert folder.entries["layers.0.attn.wq_a.scale"].name == "model.layers.0.self_attn.wq_a.weight_scale_inv"
    old["layers.0.attn.wq_a.scale"] = tensors["layers.0.attn.wq_a.scale"]
    refused(single(tmp_path / "old", old, config), "a second layers.0.attn.wq_a.scale", "weight_scale_inv")


def test_folder_and_config(tmp_path, tensors, config):
    refused(tmp_path / "nowhere", "no such folder")
    path = single(tmp_path / "a", tensors, config)
    (path / SINGLE_FILE).rename(path / "other.safetensors")
    refused(path, f"neither {INDEX_FILE} nor {SINGLE_FILE}")
    (path / "other.safetensors").rename(path / SINGLE_FILE)
    (path / "config.json").unlink()
    refused(path, "config.json", "cannot be read")
    (path / "config.json").write_text("{")
    refused(path, "config.json")
    for change, parts in (
        ({"model_type": "deepseek_v4"}, ("model_type", "deepseek_v4")),
        ({"quantization_config": {**config["quantization_config"], "quant_method": "awq"}}, ("quant_method", "awq")),
        ({"quantization_config": {**config["quantization_config"], "weight_block_size": [128, 128]}}, ("128",)),
    ):
        (path / "config.json").write_text(json.dumps(config | change))
        refused(path, "config.json", *parts)


CHANGES = {
    "missing": (lambda t: t.pop("mtp.1.attn.wkv.scale"), ("mtp.1.attn.wkv.scale: missing", "F8_E8M0 [2, 4]")),
    "extra": (lambda t: t.update({"layers.0.attn.new": np.zeros(3, np.float32)}), ("layers.0.attn.new", "unexpected")),
    "another layer": (
        lambda t: t.update({"layers.10.attn.attn_sink": np.zeros(4, np.float32)}),
        ("layers.10.attn.attn_sink", "unexpected"),
    ),
    "compressor without source": (  # pitfall 1
        lambda t: t.update({"layers.3.attn.compressor.norm.weight": np.zeros(64, ml_dtypes.bfloat16)}),
        ("layers.3.attn.compressor.norm.weight", "unexpected"),
    ),
    "shape": (
        lambda t: t.update({"norm.weight": np.zeros(64, ml_dtypes.bfloat16)}),
        ("norm.weight", "shape [64]", "[128]"),
    ),
    "scale blocks of 128": (  # pitfall 3
        lambda t: t.update({"layers.0.attn.wo_b.scale": t["layers.0.attn.wo_b.scale"][:1, :1]}),
        ("layers.0.attn.wo_b.scale", "shape [1, 1]"),
    ),
    "transposed": (
        lambda t: t.update({"layers.0.attn.wkv.weight": t["layers.0.attn.wkv.weight"].T}),
        ("layers.0.attn.wkv.weight", "shape [128, 64]", "[64, 128]"),
    ),
    "dtype": (
        lambda t: t.update({"norm.weight": np.zeros(128, np.float32)}),
        ("norm.weight", "dtype F32", "BF16"),
    ),
    "scale as bytes": (  # pitfall 4
        lambda t: t.update({"layers.0.attn.wkv.scale": t["layers.0.attn.wkv.scale"].view(np.uint8)}),
        ("layers.0.attn.wkv.scale", "dtype U8", "F8_E8M0"),
    ),
    "weight as bytes": (  # pitfall 5
        lambda t: t.update({"layers.0.attn.wkv.weight": t["layers.0.attn.wkv.weight"].view(np.int8)}),
        ("layers.0.attn.wkv.weight", "dtype I8", "F8_E4M3"),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_tensors_that_the_config_does_not_imply(case, tmp_path, tensors, config):
    change, parts = CHANGES[case]
    tensors = dict(tensors)
    change(tensors)
    refused(single(tmp_path / "a", tensors, config), "1 problem:", *parts)
    path, _ = sharded(tmp_path / "b", tensors, config)
    refused(path, *parts)


def test_many_problems_are_counted(tmp_path, tensors, config):
    kept = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    refused(single(tmp_path / "a", kept, config), "problems:", "mtp.0", "missing")
    with pytest.raises(CheckpointError) as error:
        ReleasedFolder.open(tmp_path / "a")
    assert f"... and {len(tensors) - len(kept) - 10} more" in str(error.value)
    assert str(error.value).count("missing;") == 10
    # A configuration of another model is noticed by its tensors.
    config["text_config"]["moe_intermediate_size"] = 96
    refused(single(tmp_path / "b", tensors, config), "w1.weight", "config.json implies [96, 64]")


def test_truncated_shard(tmp_path, tensors, config):
    path, _ = sharded(tmp_path / "a", tensors, config)
    file = path / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    refused(path, file.name, "truncated", "fetch the file again")
    os.truncate(file, 3)
    refused(path, file.name, "truncated")


def test_bad_index(tmp_path, tensors, config):
    path, index = sharded(tmp_path / "a", tensors, config)
    good = index["weight_map"]
    name, other = "norm.weight", next(n for n, f in good.items() if f != good["norm.weight"])

    def with_index(content, *parts):
        (path / INDEX_FILE).write_text(content if isinstance(content, str) else json.dumps(content))
        refused(path, *parts)

    with_index("{", INDEX_FILE, "bad index")
    with_index({"metadata": {}}, "no weight_map")
    with_index([], "no weight_map")
    for file in ("../model.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "a.bin", 3, "C:\\a.safetensors"):
        with_index({"weight_map": {**good, name: file}}, "bad index", name, repr(file))
    with_index('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "'a' appears twice")
    with_index({"weight_map": {**good, name: "absent.safetensors"}}, "absent.safetensors", "not in the folder")
    with_index({"weight_map": {**good, name: good[other]}}, name, f"the index puts it in {good[other]}")
    with_index({"weight_map": {k: v for k, v in good.items() if k != name}}, name, "the index does not name it")
    with_index({"weight_map": {**good, "ghost": good[name]}}, "ghost: not in", good[name])
    for total in (index["metadata"]["total_size"] + 1, 0):
        with_index({"metadata": {"total_size": total}, "weight_map": good}, "total_size", str(total))
    with_index({"metadata": {"total_size": "big"}, "weight_map": good}, "total_size")
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": good}))
    ReleasedFolder.open(path)  # the total is optional


def test_a_tensor_in_two_files_and_files_that_do_not_belong(tmp_path, tensors, config):
    path, _ = sharded(tmp_path / "a", tensors, config)
    shutil.copy(path / "model-00001-of-00003.safetensors", path / "copy.safetensors")
    refused(path, f"copy.safetensors: in the folder but not named in {INDEX_FILE}")
    (path / "copy.safetensors").unlink()
    first = read_safetensors(path / "model-00001-of-00003.safetensors")
    second = read_safetensors(path / "model-00002-of-00003.safetensors")
    twice = next(iter(first))
    write_safetensors(path / "model-00002-of-00003.safetensors", second | {twice: first[twice]})
    refused(path, f"{twice}: in model-00002-of-00003.safetensors, but the index puts it in model-00001")
    alone = single(tmp_path / "b", tensors, config)
    shutil.copy(alone / SINGLE_FILE, alone / "more.safetensors")
    refused(alone, "more.safetensors")


def test_huge_header(tmp_path, tensors, config):
    path = single(tmp_path / "a", tensors, config)
    with open(path / SINGLE_FILE, "r+b") as file:
        file.write((1 << 60).to_bytes(8, "little"))
    refused(path, SINGLE_FILE, "more than the limit")
