"""Rotary tables and rotations against the golden ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import rope
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import FLOAT32, RELEASED
from module_golden import GOLDEN, assert_same_bits, assert_within_one_ulp, load

GOLD = load("rope")
TABLES = ["plain", "yarn", "tinyA_plain", "tinyA_yarn"]
angles = jax.jit(rope.angles)
rotate = jax.jit(rope.rotate_tail, static_argnums=(3, 4))


def table(name: str) -> np.ndarray:
    dim, original, theta, factor, fast, slow = GOLD[f"{name}.params"]
    if not original:
        return rope.frequencies(int(dim), theta)
    return rope.yarn_frequencies(int(dim), theta, original, factor, fast, slow)


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_are_bit_equal(name):
    assert_same_bits(table(name), GOLD[f"{name}.inv_freq"])
    dim, original, theta, _, fast, slow = GOLD[f"{name}.params"]
    if original:
        low_high = rope.yarn_range(int(dim), theta, original, fast, slow)
        assert low_high == tuple(GOLD[f"{name}.low_high"])
        assert name != "yarn" or low_high == (15, 25)


@pytest.mark.parametrize(("file", "prefix"), [("released_config.json", ""), ("tinyA_config.json", "tinyA_")])
def test_a_layer_with_a_compressed_stream_uses_yarn_and_the_others_do_not(file, prefix):
    config = ModelConfig.from_json(GOLDEN / file)
    assert_same_bits(rope.layer_frequencies(config, True), GOLD[f"{prefix}yarn.inv_freq"])
    assert_same_bits(rope.layer_frequencies(config, False), GOLD[f"{prefix}plain.inv_freq"])


def test_without_scaling_the_compressed_base_stands_alone():
    mapping = json.loads((GOLDEN / "tinyA_config.json").read_text())
    mapping["text_config"]["rope_scaling"] = None
    config = ModelConfig.from_json(mapping)
    np.testing.assert_array_equal(rope.layer_frequencies(config, True), rope.frequencies(16, 160000))


@pytest.mark.parametrize("name", TABLES)
def test_angles_of_every_position_up_to_a_million(name):
    """The angle is a float32 product, bit by bit; its sine and cosine need the full range reduction."""
    positions = GOLD["positions"]
    assert_same_bits(positions.astype(np.float32)[:, None] * table(name), GOLD[f"{name}.angle"])
    cos, sin = angles(positions.astype(np.int32), table(name))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, GOLD[f"{name}.cos"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, GOLD[f"{name}.sin"], rtol=0, atol=1e-6)


@jax.jit
def rotations(frequencies, positions, xs, forwards):
    """Forward, inverse and inverse of the golden forward, of x3 [1, n, d] and x4 [1, n, heads, d]."""
    cos, sin = rope.angles(positions, frequencies)
    axes = {"x3": (cos, sin), "x4": (cos[:, None], sin[:, None])}
    return {
        case: {
            "fwd": rope.rotate_tail(x, *axes[case], RELEASED),
            "inv": rope.rotate_tail(x, *axes[case], RELEASED, inverse=True),
            "fwd_inv": rope.rotate_tail(forwards[case], *axes[case], RELEASED, inverse=True),
        }
        for case, x in xs.items()
    }


@pytest.mark.parametrize("name", TABLES)
def test_rotations_there_and_back(name):
    gold = {k.removeprefix(f"{name}."): v for k, v in GOLD.items() if k.startswith(f"{name}.x")}
    xs, forwards = ({case: gold[case + suffix] for case in ("x3", "x4")} for suffix in ("", "_fwd"))
    for case, found in rotations(table(name), GOLD["positions"].astype(np.int32), xs, forwards).items():
        for what, got in found.items():
            assert_within_one_ulp(got, gold[f"{case}_{what}"])


def test_only_the_tail_is_rotated_and_pairs_keep_their_length():
    cos, sin = angles(np.arange(7), table("tinyA_plain"))
    x = np.random.default_rng(0).standard_normal((2, 7, 40)).astype(np.float32)
    y = np.asarray(rotate(x, cos, sin, FLOAT32, False))
    assert_same_bits(y[..., :24], x[..., :24])
    assert_same_bits(y[:, 0], x[:, 0])  # position 0
    pairs = np.linalg.norm(x[..., 24:].reshape(2, 7, 8, 2), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(y[..., 24:].reshape(2, 7, 8, 2), axis=-1), pairs, rtol=1e-6)
    np.testing.assert_allclose(rotate(y, cos, sin, FLOAT32, True), x, atol=1e-6)


def test_scores_depend_on_the_distance_only():
    q_and_k = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)

    def score(position: int, distance: int) -> float:
        cos, sin = angles(np.array([position + distance, position]), table("tinyA_plain"))
        rotated = np.asarray(rotate(q_and_k, cos, sin, FLOAT32, False))
        return float(rotated[0] @ rotated[1])

    assert abs(score(3, 5) - score(61, 5)) < 1e-4
    assert abs(score(3, 5) - score(3, 6)) > 1e-2


@pytest.mark.parametrize("mistake", ["bases_swapped", "half_split", "inverse", "no_yarn"])
def test_wrong_rotations_fail_the_golden_comparison(mistake):
    """Negative control."""
    name, inverse = "tinyA_yarn", mistake == "inverse"
    frequencies = table(name)
    if mistake == "bases_swapped":
        frequencies = table("tinyA_plain")
    elif mistake == "no_yarn":
        frequencies = rope.frequencies(16, GOLD[f"{name}.params"][2])
    x, want = GOLD[f"{name}.x3"], GOLD[f"{name}.x3_fwd"]
    if mistake == "half_split":
        order = np.arange(16).reshape(2, 8).T.ravel()
        x, want = x[..., order], want[..., order]
    cos, sin = angles(GOLD["positions"].astype(np.int32), frequencies)
    with pytest.raises(AssertionError):
        assert_within_one_ulp(rotate(x, cos, sin, RELEASED, inverse), want)
