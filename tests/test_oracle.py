"""The slow oracle against the golden numbers of tiny model A, and against itself on random weights."""

import copy
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from oracle import END, IMAGE, NEW_LINE, START, TEXT, Oracle
from oracle_engram import multipliers, table_primes, table_rows
from oracle_parts import rope_frequencies
from oracle_weights import (
    dequantise,
    dequantise_one,
    random_weights,
    read_safetensors,
    store_fp4,
    store_fp8,
    write_safetensors,
)

GOLDEN = Path(__file__).parent / "golden"
# The golden numbers are float32 arithmetic (noise about 1e-5); the oracle is float64.
LOGIT_ATOL = 2e-5
TOPK_LAYERS = (2, 4, 6, 8)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((GOLDEN / "tinyA_config.json").read_text())


@pytest.fixture(scope="module")
def token_map() -> np.ndarray:
    return np.load(GOLDEN / "tinyA_token_map.npz")["token_map"]


@pytest.fixture(scope="module")
def tiny(config, token_map) -> Oracle:
    return Oracle(config, dequantise(read_safetensors(GOLDEN / "tinyA_model.safetensors")), token_map)


def golden(name: str) -> dict[str, np.ndarray]:
    return read_safetensors(GOLDEN / f"tinyA_{name}.safetensors")


def padded(rows: np.ndarray, width: int = 8) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=LOGIT_ATOL)


@pytest.mark.parametrize("name", ["short", "mid", "long"])
def test_prefill_decode_and_drafts_match_golden(tiny, name):
    g = golden(name)
    ids, decoded = g["input_ids"][0], g["fp32.decode_tokens"]
    n = len(ids)
    result = tiny.forward(np.concatenate([ids, decoded[:-1]]))
    assert_close(result["logits"][:n], g["fp32.prefill_logits"])
    assert_close(result["logits"][n:], g["fp32.decode_logits"])
    np.testing.assert_array_equal(result["logits"][n - 1 :].argmax(-1), decoded)
    for layer in TOPK_LAYERS:
        np.testing.assert_array_equal(result["topk"][layer][:n], padded(g[f"fp32.prefill_topk.{layer}"]))
        np.testing.assert_array_equal(result["topk"][layer][n:], padded(g[f"fp32.decode_topk.{layer}"]))
    np.testing.assert_array_equal(result["candidates"][6][:n, :n], g["fp32.prefill_candidates.6"])
    for layer in (1, 4):
        np.testing.assert_array_equal(result["engram_hash"][layer][:n], g[f"engram_hash.{layer}"])
    last = len(g["fp32.prefill_main_hidden"])
    assert_close(result["taps"][n - last : n], g["fp32.prefill_main_hidden"])
    draft = tiny.draft(result, n - 1, int(decoded[0]))
    np.testing.assert_array_equal(draft["tokens"], g["fp32.dspark_after_prefill_tokens"])
    assert_close(draft["logits"], g["fp32.dspark_after_prefill_logits"])
    assert_close(draft["confidence"], g["fp32.dspark_after_prefill_confidence"])
    recorded = g["fp32.dspark_logits"]
    for step in range(24):
        draft = tiny.draft(result, n + step, int(decoded[step + 1]))
        np.testing.assert_array_equal(draft["tokens"], g["fp32.dspark_tokens"][step])
        assert_close(draft["confidence"], g["fp32.dspark_confidence"][step])
        if step < len(recorded):
            assert_close(draft["logits"], recorded[step])


def test_every_block_matches_golden(tiny):
    g = golden("short")
    result = tiny.forward(g["input_ids"][0])
    for layer in range(10):
        assert_close(result["block_out"][layer], g[f"fp32.block{layer}.out"])
        assert_close(result["pre_mix"][layer], g[f"fp32.block{layer}.pre_mix"])


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 31, 32, 33])
def test_lengths_around_the_window_match_golden(tiny, n):
    g = golden("edges")
    decoded = g[f"len{n}.decode_tokens"]
    logits = tiny.forward(np.concatenate([g[f"len{n}.input_ids"], decoded[:-1]]))["logits"]
    assert_close(logits[:n], g[f"len{n}.fp32.prefill_logits"])
    assert_close(logits[n:], g[f"len{n}.fp32.decode_logits"])


def test_image_prompt_matches_golden(tiny):
    g = golden("image")
    n, decoded = len(g["input_ids"]), g["fp32.decode_tokens"]
    ids = np.concatenate([g["input_ids"], decoded[:-1]])
    types = np.concatenate([g["token_types"], np.full(len(decoded) - 1, TEXT)])
    rows = np.concatenate([g["fp32.image0.aligner"], g["fp32.image1.aligner"]])
    assert_close(tiny.embed(ids, rows, types)[:n], g["fp32.embed"])
    result = tiny.forward(ids, rows, types)
    assert_close(result["logits"][:n], g["fp32.prefill_logits"])
    assert_close(result["logits"][n:], g["fp32.decode_logits"])
    for layer in TOPK_LAYERS:
        np.testing.assert_array_equal(result["topk"][layer][:n], g[f"fp32.prefill_topk.{layer}"])
    for layer in (1, 4):
        np.testing.assert_array_equal(result["engram_hash"][layer][:n], g[f"engram_hash.{layer}"])
    for step in range(12):
        draft = tiny.draft(result, n + step, int(decoded[step + 1]))
        np.testing.assert_array_equal(draft["tokens"], g["fp32.dspark_tokens"][step])


def cross_entropy_sum(logits: np.ndarray, ids: np.ndarray) -> float:
    shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(ids) - 1), ids[1:]]).sum())


def test_loss_alone_and_packed_matches_golden(tiny):
    g = golden("grads")
    ids = g["input_ids"].reshape(-1)
    # Both are float64; the recorded one comes from another program, so this is far tighter than float32 would allow.
    assert abs(cross_entropy_sum(tiny.forward(ids)["logits"], ids) / (len(ids) - 1) - g["loss_f64"].item()) < 1e-7
    ids, lengths = g["packed.input_ids"].reshape(-1), g["packed.lens"].tolist()
    samples = np.split(ids, np.cumsum(lengths)[:-1])
    for result, sample, expected in zip(tiny.forward_packed(ids, lengths), samples, g["packed.ce_sum"], strict=True):
        assert abs(cross_entropy_sum(result["logits"], sample) - expected) < 1e-4


def test_stored_weights_dequantise():
    z = np.load(GOLDEN / "quant.npz")
    e4m3, e8m0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
    fp8 = dequantise_one(z["w_fp8.weight__e4m3"].view(e4m3), z["w_fp8.scale__e8m0"].view(e8m0))
    np.testing.assert_array_equal(fp8, z["w_fp8.dequant"])
    fp4 = dequantise_one(z["w_fp4.weight__fp4x2"], z["w_fp4.scale__e8m0"].view(e8m0))
    np.testing.assert_array_equal(fp4, z["w_fp4.dequant"])
    probe = dequantise_one(
        z["probe_fp4.packed__fp4x2"].view(np.int8)[None], z["probe_fp4.scale__e8m0"].view(e8m0)[None]
    )
    np.testing.assert_array_equal(probe[0], z["probe_fp4.dequant"])


def test_storing_what_was_dequantised_changes_nothing():
    rng = np.random.default_rng(0)
    for store in (store_fp8, store_fp4, lambda v: store_fp8(v, row_block=1)):
        once = dequantise_one(*store(rng.standard_normal((64, 96))))
        np.testing.assert_array_equal(dequantise_one(*store(once)), once)


def test_frequencies_and_engram_layout_match_golden(config):
    z = np.load(GOLDEN / "rope.npz")
    for key, ratio in (("tinyA_plain", 0), ("tinyA_yarn", 1)):
        np.testing.assert_array_equal(rope_frequencies(config["text_config"], ratio), z[f"{key}.inv_freq"])
    for case in ("released", "small"):
        record = json.loads((GOLDEN / "engram.json").read_text())[case]
        args = record["args"]
        assert [sum(rows, []) for rows in table_primes(args).values()] == record["primes"]
        assert table_rows(args) == record["table_rows"] == args["engram_num_embeddings"]
        drawn = [[str(m) for m in multipliers(args, layer)] for layer in args["engram_layer_ids"]]
        assert drawn == record["multipliers"]


def test_random_weights_have_the_released_names_shapes_and_types(config, tmp_path):
    released, made = read_safetensors(GOLDEN / "tinyA_model.safetensors"), random_weights(config, 0)
    assert {k: (v.dtype, v.shape) for k, v in made.items()} == {k: (v.dtype, v.shape) for k, v in released.items()}
    write_safetensors(tmp_path / "made.safetensors", made)
    back = read_safetensors(tmp_path / "made.safetensors")
    assert all(
        back[name].tobytes() == array.tobytes() and back[name].dtype == array.dtype for name, array in made.items()
    )


def variant(config: dict, **changes: object) -> dict:
    """A copy of the config with other text values and the Engram sizes that belong to them."""
    other = copy.deepcopy(config)
    other["text_config"].update(changes)
    other["text_config"]["engram_num_embeddings"] = table_rows(other["text_config"])
    return other


# Ending of a tensor name -> what the tensor is filled with.
MECHANISMS = {
    "attn_sink": 0.0, "hc_attn_base": 0.0, "hc_ffn_base": 0.0, "gate.bias": 0.0, "gate.bias_vl": 0.0,
    "engram.embed.weight": 0.0, "engram.q_weight": 1.0, "compressor.wkv.weight": 0.0, "compressor.wgate.weight": 0.0,
    "indexer.k_norm.weight": 1.0, "q_norm.weight": 1.0, "kv_norm.weight": 1.0, "shared_experts.w2.weight": 0.0,
    "image_newline": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed_prompt(config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """44 tokens with one image span of 2 x 5 cells, ids not reserved."""
    rng = np.random.default_rng(3)
    ids, types = rng.integers(3, 490, 44), np.full(44, TEXT)
    span = [START] + 2 * ([IMAGE] * 5 + [NEW_LINE]) + [END]
    types[20 : 20 + len(span)] = span
    ids[types != TEXT] = config["image_token_id"]
    return ids, rng.standard_normal((10, config["text_config"]["hidden_size"])), types


def test_each_mechanism_moves_random_weight_logits(config, token_map, mixed_prompt):
    """Negative control: if the loss of a mechanism could not be seen, comparing with the oracle would not test it."""
    config = variant(
        config, num_hidden_layers=4, compress_ratios=[0, 2, 1, 1], kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 3], candidate_source_layer_id=2, candidate_topk_blocks=3, engram_layer_ids=[1],
        num_nextn_predict_layers=0, dspark_target_layer_ids=[],
    )  # fmt: skip
    weights = dequantise(random_weights(config, 1))
    base = Oracle(config, weights, token_map).forward(*mixed_prompt)["logits"]
    for ending, value in MECHANISMS.items():
        changed = {k: np.full_like(v, value) if k.endswith(ending) else v for k, v in weights.items()}
        moved = Oracle(config, changed, token_map).forward(*mixed_prompt)["logits"] - base
        assert np.sqrt(np.mean(moved**2)) > 0.02, ending


VARIANTS = {
    "window layers in between, ratio 3, no pool": {
        "num_hidden_layers": 6, "compress_ratios": [0, 3, 0, 3, 1, 0, 0], "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": None, "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [5], "hc_mult": 2, "scoring_func": "sigmoid", "engram_layer_ids": [0, 4],
        "engram_max_ngram_size": 3,
    },
    "pool at the first source, no Engram, no drafts, no YaRN": {
        "num_hidden_layers": 4, "compress_ratios": [1, 1, 1, 0], "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 0, "candidate_topk_blocks": 3,
        "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [], "rope_scaling": None, "engram_layer_ids": [],
        "scoring_func": "softmax", "norm_topk_prob": False, "swiglu_limit": 0.0,
    },
    "window layers only": {
        "num_hidden_layers": 2, "compress_ratios": [0, 0, 0, 0, 0], "kv_source_layer_ids": [],
        "index_source_layer_ids": [], "candidate_source_layer_id": None, "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [0, 1], "engram_layer_ids": [1],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_other_layer_maps_are_causal(config, token_map, name):
    other = variant(config, **VARIANTS[name])
    oracle = Oracle(other, dequantise(random_weights(other, 2)), token_map)
    ids = np.random.default_rng(4).integers(3, 490, 50)
    whole = oracle.forward(ids)
    assert np.isfinite(whole["logits"]).all()
    for n in (1, 2, 17, 38):
        part = oracle.forward(ids[:n])
        np.testing.assert_allclose(part["logits"], whole["logits"][:n], rtol=0, atol=1e-10)
        for layer, rows in part["topk"].items():
            np.testing.assert_array_equal(rows, whole["topk"][layer][:n])
        if other["text_config"]["num_nextn_predict_layers"]:
            a, b = oracle.draft(part, n - 1, 7), oracle.draft(whole, n - 1, 7)
            np.testing.assert_allclose(a["logits"], b["logits"], rtol=0, atol=1e-10)


def test_forbidden_sizes_are_refused(config):
    bad = copy.deepcopy(config)
    bad["text_config"]["candidate_topk_blocks"] = 2
    with pytest.raises(ValueError, match="candidate pool"):
        Oracle(bad, {})
    bad = copy.deepcopy(config)
    bad["text_config"]["engram_num_embeddings"][0] += 1
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        Oracle(bad, {})
