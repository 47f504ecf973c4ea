"""The list of tensors derived from a configuration, against the released one and a real header."""

import json
import re
import struct
from collections import Counter
from pathlib import Path

import pytest

from dsv41_jax.checkpoint.manifest import iter_tensors, manifest, totals
from dsv41_jax.config import ModelConfig, load_config
from random_configs import random_legal_config

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests/golden"


@pytest.fixture(scope="module")
def flash():
    return load_config(ROOT / "configs/flash.py")


@pytest.fixture(scope="module")
def flash_names(flash):
    return manifest(flash)


def test_released_totals(flash):
    found = totals(flash)
    assert found.tensors == 96_085
    assert found.nbytes == 510_286_023_000
    assert found.parameters == 763_205_315_794
    assert found.bytes_by_dtype == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }


def test_released_groups(flash_names):
    count, size = Counter(), Counter()
    for spec in flash_names.values():
        part = spec.name.split(".")
        if part[0] == "layers" and part[2] == "engram":
            group = "engram tables" if part[3] == "embed" else "engram"
        elif part[0] == "layers":
            group = "layers 0-19" if int(part[1]) < 20 else "layers 20-39"
        else:
            group = {"mtp": "dspark", "embed": "embed", "head": "head", "norm": "head"}.get(part[0], "vision")
        count[group] += 1
        size[group] += spec.nbytes
    assert {group: (count[group], size[group]) for group in count} == {
        "layers 0-19": (46_704, 147_838_599_136),
        "layers 20-39": (46_699, 147_823_271_392),
        "engram": (8, 315_043_840),
        "engram tables": (4, 202_758_032_400),
        "dspark": (2_401, 7_932_874_632),
        "vision": (266, 970_536_960),
        "embed": (1, 1_323_827_200),
        "head": (2, 1_323_837_440),
    }


def test_released_patterns(flash_names):
    """Every name pattern has the listed count, dtype and shape, and no tensor is outside the list."""
    golden = json.loads((GOLDEN / "released_manifest.json").read_text())
    left = Counter((re.sub(r"\.\d+\.", ".*.", s.name), s.dtype, s.shape) for s in flash_names.values())
    wanted = Counter()
    for row in golden["patterns"]:
        wanted[row["pattern"], row["dtype"], tuple(row["shape"])] += row["count"]
    assert left == wanted
    for row in golden["patterns"]:
        assert flash_names[row["example"]].shape == tuple(row["shape"])
        for layer in row["layers"] or ():
            assert re.sub(r"^(layers|mtp)\.\*", rf"\g<1>.{layer}", row["pattern"]).replace("*", "0") in flash_names


def test_tiny_header_is_predicted():
    with (GOLDEN / "tinyA_model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    found = {name: (row["dtype"], tuple(row["shape"])) for name, row in header.items() if name != "__metadata__"}
    specs = manifest(load_config(ROOT / "configs/tiny.py"))
    assert {name: (spec.dtype, spec.shape) for name, spec in specs.items()} == found
    for name, spec in specs.items():
        begin, end = header[name]["data_offsets"]
        assert end - begin == spec.nbytes


def test_names_carry_no_prefix(flash_names):
    """Pitfall A8: names start at the layer, with no `model.` and no leading dot."""
    assert flash_names["layers.0.attn.wq_a.weight"].shape == (1280, 5120)
    assert not [name for name in flash_names if name.startswith(("model.", "."))]


def test_compressors_belong_to_kv_sources(flash_names):
    """Pitfalls A1 and A2: a compressor for each KV source only, a gate only at ratio 2."""
    owners = [int(name.split(".")[1]) for name in flash_names if name.endswith("compressor.wkv.weight")]
    gates = [int(name.split(".")[1]) for name in flash_names if name.endswith("compressor.wgate.weight")]
    assert owners == [2, 8, 14, 20] and gates == [2, 8, 14]


@pytest.mark.parametrize("seed", range(8))
def test_random_configs(seed):
    config = ModelConfig.from_json(random_legal_config(seed))
    specs = list(iter_tensors(config))
    names = {spec.name: spec for spec in specs}
    assert len(names) == len(specs)
    assert sum("compressor.wkv" in name for name in names) == len(config.kv_source_layer_ids)
    assert sum("weights_proj" in name for name in names) == len(config.index_source_layer_ids)
    assert sum("engram.embed.weight" in name for name in names) == len(config.engram_layer_ids)
    assert sum("markov_head.embed" in name for name in names) == bool(config.n_draft)
    assert not any(name.startswith(("vision", "aligner", "image_")) for name in names)
    for spec in specs:
        if spec.kind in ("fp8", "fp4", "table"):
            scale = names[spec.name.removesuffix("weight") + "scale"]
            rows, columns = spec.logical_shape
            assert scale.shape == (rows // 32 if spec.kind == "fp8" else rows, columns // 32)
        assert min(spec.shape) > 0
