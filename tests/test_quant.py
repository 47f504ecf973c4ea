"""Quantisers and formats: every golden row bit by bit, and the properties the golden rows do not show."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax import quant
from module_golden import BF16, GOLDEN, assert_same_bits, bits, load, wide

GOLD = load("quant")
ROWS = json.loads((GOLDEN / "quant_rows.json").read_text())
E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
QUANTISERS = {
    "fp8_b32": (quant.q8, quant.fake_q8),
    "fp4_b32_e8m0": (quant.q4_index, quant.fake_q4_index),
    "fp4_b16_e4m3": (quant.q4_main, quant.fake_q4_main),
}
quantise_jitted = {name: jax.jit(exact) for name, (exact, _) in QUANTISERS.items()}
fake_jitted = {name: jax.jit(fake) for name, (_, fake) in QUANTISERS.items()}
repack = jax.jit(lambda codes, packed: (quant.pack_fp4(codes), quant.unpack_fp4(packed)))
dequantise = jax.jit(quant.dequantize_weight, static_argnums=1)


@pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "op_by_op"])
@pytest.mark.parametrize("name", QUANTISERS)
def test_all_28_rows_equal_golden_bits(name, jitted):
    exact, fake = (quantise_jitted[name], fake_jitted[name]) if jitted else QUANTISERS[name]
    x = jnp.asarray(GOLD["x"])
    assert len(ROWS) == len(x) == 28
    codes, scale = map(np.asarray, exact(x))
    dequantised = np.asarray(fake(x))
    for row, what in enumerate(ROWS):
        for got, want in ((codes, "codes"), (scale, "scale"), (dequantised, "dequant")):
            np.testing.assert_array_equal(bits(got[row]), bits(GOLD[f"{name}.{want}"][row]), err_msg=f"{want}: {what}")
    assert dequantised.dtype == BF16
    if name != "fp8_b32":
        packed, unpacked = repack(codes, GOLD[f"{name}.packed"])
        assert_same_bits(packed, GOLD[f"{name}.packed"])
        assert_same_bits(unpacked, GOLD[f"{name}.codes"])


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_row_does_not_depend_on_its_neighbours(name):
    codes, scale = quantise_jitted[name](GOLD["x"][::-1])
    np.testing.assert_array_equal(bits(codes)[::-1], bits(GOLD[f"{name}.codes"]))
    np.testing.assert_array_equal(bits(scale)[::-1], bits(GOLD[f"{name}.scale"]))


def test_decode_tables_of_every_code():
    every = jnp.arange(256, dtype=jnp.uint8)

    @jax.jit
    def decode(every, e2m1, powers):
        e4m3 = jax.lax.bitcast_convert_type(every, jnp.float8_e4m3fn).astype(jnp.float32)
        stored_e8m0 = jax.lax.bitcast_convert_type(every, jnp.float8_e8m0fnu)
        scales = quant.e8m0_to_f32(every), quant.e8m0_to_f32(stored_e8m0)
        nibbles = quant.e2m1_values(every[:16]), quant.e2m1_codes(e2m1), quant.pack_fp4(quant.unpack_fp4(every))
        return e4m3, scales, nibbles, quant.f32_to_e8m0(powers)

    powers = GOLD["e8m0_table"][1:255]
    e4m3, scales, nibbles, encoded = jax.tree.map(np.asarray, decode(every, GOLD["e2m1_table"], powers))
    np.testing.assert_array_equal(e4m3, GOLD["e4m3_table"])  # NaN equals NaN here
    assert np.signbit(e4m3[0x80]) and e4m3[0x38] == 1.0 and np.isnan(e4m3[[0x7F, 0xFF]]).all()

    for e8m0 in scales:
        np.testing.assert_array_equal(bits(e8m0)[:255], bits(GOLD["e8m0_table"])[:255])
        # Byte 0 is 2^-127, which float32 can only hold as a subnormal number; byte 120 is 2^-7, not 120.
        assert bits(e8m0)[0] == 0x00400000 and e8m0[120] == 2.0**-7 and e8m0[127] == 1.0
        assert np.isnan(e8m0[255]) and np.isnan(GOLD["e8m0_table"][255])
    np.testing.assert_array_equal(bits(encoded), np.arange(1, 255))

    np.testing.assert_array_equal(bits(nibbles[0]), bits(GOLD["e2m1_table"]))
    np.testing.assert_array_equal(nibbles[1], np.arange(16))
    np.testing.assert_array_equal(nibbles[2], np.arange(256))


def stored(name: str, weight: str) -> dict[str, np.ndarray]:
    return {"weight": GOLD[f"{name}.{weight}"], "scale": GOLD[f"{name}.scale"]}


def test_stored_weights_and_real_checkpoint_bytes_dequantise_to_golden():
    leaves = {"w_fp8": stored("w_fp8", "weight"), "w_fp4": stored("w_fp4", "weight")}
    # One row of published bytes each: layers.0 wkv, and w1 of expert 0 of layer 0.
    leaves["probe_fp8"] = jax.tree.map(lambda a: a[None], stored("probe_fp8", "codes"))
    leaves["probe_fp4"] = jax.tree.map(lambda a: a[None], stored("probe_fp4", "packed"))
    leaves["w_fp4_signed"] = {**leaves["w_fp4"], "weight": leaves["w_fp4"]["weight"].view(np.int8)}
    dtypes = (jnp.float32, jnp.bfloat16)  # exact in bf16 too
    got = jax.jit(lambda leaves: {k: [quant.dequantize_weight(v, d) for d in dtypes] for k, v in leaves.items()})(
        leaves
    )
    for name, pair in got.items():
        want = GOLD[f"{name.removesuffix('_signed')}.dequant"]
        for dtype, values in zip(dtypes, pair, strict=True):
            assert values.dtype == dtype
            np.testing.assert_array_equal(wide(values).reshape(want.shape), want)


def test_a_scale_of_another_shape_is_refused():
    leaf = stored("w_fp8", "weight")
    with pytest.raises(ValueError, match="scale"):
        quant.dequantize_weight({**leaf, "scale": leaf["scale"][:2]})


def test_scales_are_per_32_by_32_block_or_per_row():
    codes = np.full((64, 64), 0x38, np.uint8).view(E4M3)  # 1.0
    blocks = np.array([[120, 127], [128, 130]], np.uint8).view(E8M0)
    want = np.repeat(np.repeat([[2.0**-7, 1], [2, 8]], 32, axis=0), 32, axis=1)
    np.testing.assert_array_equal(dequantise({"weight": codes, "scale": blocks}, jnp.float32), want)
    rows = np.arange(64, 192, dtype=np.uint8).reshape(64, 2).view(E8M0)
    want = np.repeat(np.exp2(np.arange(64, 192, dtype=np.float32) - 127).reshape(64, 2), 32, axis=1)
    np.testing.assert_array_equal(dequantise({"weight": codes, "scale": rows}, jnp.float32), want)


@pytest.mark.parametrize(("rounder", "kind", "limit"), [(quant.round_e4m3, E4M3, 448), (quant.round_e2m1, E2M1, 6)])
def test_rounding_equals_the_formats_own_cast(rounder, kind, limit):
    """All bf16 numbers (every tie, both zeros, infinities) and float32 numbers one step beside the ties."""
    all_bf16 = np.arange(65536, dtype=np.uint16).view(BF16).astype(np.float32)
    grid = np.arange(128 if kind is E4M3 else 8, dtype=np.uint8).view(kind).astype(np.float32)
    grid = grid[np.isfinite(grid)]
    ties = (grid[1:] + grid[:-1]) / 2
    beside = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    x = np.concatenate([all_bf16[~np.isnan(all_bf16)], beside, -beside])
    got = np.asarray(jax.jit(rounder)(x))
    want = np.clip(x, -limit, limit).astype(kind).astype(np.float32)
    assert_same_bits(got, want)
    assert np.abs(got).max() == limit


@pytest.mark.parametrize("name", QUANTISERS)
def test_gradient_is_exactly_the_identity(name):
    x = jnp.asarray(GOLD["x"])
    cotangent = jax.random.normal(jax.random.key(0), x.shape, jnp.bfloat16)

    @jax.jit
    def derivatives(x, cotangent):
        value, pullback = jax.vjp(QUANTISERS[name][1], x)
        return value, pullback(cotangent)[0], jax.jvp(QUANTISERS[name][1], (x,), (cotangent,))[1]

    value, reverse, forward = derivatives(x, cotangent)
    assert_same_bits(reverse, cotangent)
    assert_same_bits(forward, cotangent)
    assert_same_bits(value, GOLD[f"{name}.dequant"])
    assert (wide(value) != wide(x)).any()


@pytest.mark.parametrize("kind", ["fp8", "fp8_rows", "fp4"])
def test_fake_weight_is_what_storing_gives(kind):
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((128, 96)) * np.exp2(np.arange(-5, 123))[:, None]).astype(np.float32)
    w[0, :4] = [0.0, -0.0, 1e-30, -1e-30]

    @jax.jit
    def run(w, cotangent):
        codes, scale = (
            quant.quantize_weight_fp4(w) if kind == "fp4" else quant.quantize_weight_fp8(w, kind == "fp8_rows")
        )
        fake, pullback = jax.vjp(lambda w: quant.fake_quantize_weight(kind, w), w)
        kept = quant.dequantize_weight({"weight": codes, "scale": scale}, jnp.float32)
        return codes, scale, kept, fake, pullback(cotangent)[0]

    codes, scale, kept, fake, gradient = map(np.asarray, run(w, w[::-1]))
    assert codes.shape == ((128, 48) if kind == "fp4" else (128, 96))
    assert scale.shape == ((4, 3) if kind == "fp8" else (128, 3))
    assert scale.dtype == E8M0
    assert_same_bits(fake, kept)
    assert_same_bits(gradient, w[::-1])
    assert_same_bits(run(kept, w)[2], kept)  # storing what was stored changes nothing
    if kind != "fp8_rows":
        released = np.pad(GOLD[f"w_{kind}.dequant"], ((0, 32), (0, 32)))
        np.testing.assert_array_equal(run(released, w)[2], released)


def test_a_block_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="48"):
        quant.q8(jnp.zeros((2, 48)))
    with pytest.raises(ValueError, match="24"):
        quant.q4_main(jnp.zeros((2, 24)))


def numpy_quantise(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The three quantisers as the formats' own casts: code values and scales of x [n, 64], float32."""
    block, floor, kind = {
        "fp8_b32": (32, 1e-4, E4M3),
        "fp4_b32_e8m0": (32, 6 * 2.0**-126, E2M1),
        "fp4_b16_e4m3": (16, 6 * 2.0**-9, E2M1),
    }[name]
    limit = 448 if kind is E4M3 else 6
    blocks = x.astype(np.float32).reshape(len(x), -1, block)
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(floor))
    if name == "fp4_b16_e4m3":
        scale = np.minimum(amax / np.float32(6), 448).astype(E4M3).astype(np.float32)
    else:
        scale = np.exp2(np.ceil(np.log2((amax * np.float32(1 / limit)).astype(np.float64)))).astype(np.float32)
    with np.errstate(over="ignore"):
        return np.clip(blocks / scale, -limit, limit).astype(kind).astype(np.float32), scale[..., 0]


@pytest.mark.parametrize("name", QUANTISERS)
def test_any_finite_bf16_numbers_equal_numpy(name):
    """Random bit patterns: whole blocks over the full range of exponents, and blocks of a few near exponents."""
    rng = np.random.default_rng(11)
    for narrow in [False, True] * 20:
        patterns = rng.integers(0, 0x10000, (28, 64))
        if narrow:
            patterns = (patterns & 0x81FF) + (rng.integers(0x01, 0xFB, (28, 1)) << 7)
        infinite, subnormal = patterns & 0x7F80 == 0x7F80, patterns & 0x7F80 == 0  # both have golden rows
        patterns = np.where(infinite | subnormal, patterns & 0x8000, patterns)
        x = patterns.astype(np.uint16).view(BF16)
        codes, scale = quantise_jitted[name](x)
        scale = GOLD["e8m0_table"][bits(scale)] if scale.dtype == E8M0 else scale
        got = wide(codes) if name == "fp8_b32" else GOLD["e2m1_table"][np.asarray(codes)]
        want, want_scale = numpy_quantise(name, x)
        np.testing.assert_array_equal(wide(scale), want_scale)
        assert_same_bits(got.reshape(want.shape), want)


@pytest.mark.parametrize("mistake", ["ceil", "half_away"])
def test_wrong_rounding_fails_the_golden_rows(mistake, monkeypatch):
    """Negative control: ties and in-between values are really in the rows."""
    wrong = {"ceil": jnp.ceil, "half_away": lambda v: jnp.sign(v) * jnp.floor(jnp.abs(v) + 0.5)}

    def round_e2m1(x):
        x = jnp.clip(x, -6, 6)
        step = jnp.where(jnp.abs(x) < 2, 0.5, jnp.where(jnp.abs(x) < 4, 1.0, 2.0))
        return wrong[mistake](x / step) * step

    monkeypatch.setattr(quant, "round_e2m1", round_e2m1)
    codes, _ = jax.jit(lambda x: quant.q4_index(x))(jnp.asarray(GOLD["x"]))
    assert (np.asarray(codes) != GOLD["fp4_b32_e8m0.codes"]).any()


def test_a_scale_that_is_not_rounded_up_fails_the_golden_rows(monkeypatch):
    """Negative control: the power of two below instead of above saturates codes."""

    def below(v):
        word = jax.lax.bitcast_convert_type(v.astype(jnp.float32), jnp.uint32) & jnp.uint32(0x7F800000)
        return jax.lax.bitcast_convert_type(word, jnp.float32)

    monkeypatch.setattr(quant, "power_of_two_at_least", below)
    codes, _ = jax.jit(lambda x: quant.q8(x))(jnp.asarray(GOLD["x"]))
    assert (bits(codes) != bits(GOLD["fp8_b32.codes"])).any()
