"""Each rule of the optimizer against numpy, which parameter gets which, the schedule, clipping and skipped steps."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fake_devices
from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import load_config
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training import sinkhorn, spikes
from dsv41_jax.training.muon import orthogonalize, scale_by_muon
from dsv41_jax.training.optimizer import clip_factor, global_norm, make_optimizer, trained_gradients
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.rules import format_rules, labels, rules_table
from dsv41_jax.training.schedule import Schedule
from oracle_optimizer import OracleTable, oracle_adamw, oracle_muon, oracle_rate, sinkhorn_update

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = load_config(CONFIGS / "tiny.py")
SHORT = OptimizerSettings(
    peak_rate=0.02, final_rate=0.004, warmup_steps=2, schedule_unit="steps", decay_start=4, decay_end=8, vision_rate=0.5
)


def test_ten_steps_of_every_rule_are_those_of_numpy():
    """Warm-up and decay of the rate, and the vision encoder's start at step 4, are within the ten steps.

    Largest difference to numpy in float64, as part of what the leaf moved: 3e-5, where Newton-Schulz has enlarged the
    rounding of small singular values; 2e-4 are allowed. Heads that are not split show as 0.26.
    """
    random = np.random.default_rng(0)
    shapes = {p: _short(p, x.shape) for p, x in flatten(abstract_params(TINY, FLOAT32)) if not _is_table(p)}
    start = {p: random.standard_normal(s, np.float32) for p, s in shapes.items()}
    steps = [{p: random.standard_normal(s, np.float32) * 1e-3 for p, s in shapes.items()} for _ in range(10)]

    optimizer = make_optimizer(SHORT, TINY, Schedule.of(SHORT, 1))

    @jax.jit
    def update(params, state, gradients, step):
        updates, state = optimizer.update(gradients, state, params, step=step)
        return jax.tree.map(jnp.add, params, updates), state

    params = nest({p: jnp.asarray(x) for p, x in start.items()})
    state = optimizer.init(params)
    for number, gradients in enumerate(steps):
        params, state = update(params, state, nest(gradients), number)

    rates = [oracle_rate(number, 0.02, 0.004, 2, 4, 8) for number in range(10)]
    for path, got in flatten(params):
        name = ".".join(path)
        vision = name.startswith("vision.") and name != "vision.norm.weight"
        own = [s[path].astype(np.float64) for s in steps]
        used = rates
        if vision:
            own, used = own[4:], [0.5 * rate for rate in rates[4:]]
        before = start[path].astype(np.float64)
        if re.search(r"gate\.bias", name):
            wanted = before
        elif re.search(r"^embed|^head|markov", name):
            wanted = sinkhorn_update(before, own, used)
        elif re.search(r"\.fn$|\w\.weight$", name) and not re.search(r"norm\d?\.weight$", name):
            heads = {"attn.wq_b": TINY.num_attention_heads, "indexers.wq_b": TINY.index_n_heads, "wqkv": 3}
            parts = next((count for end, count in heads.items() if f"{end}.weight" in name), 1)
            wanted = oracle_muon(before, own, used, parts)
        else:
            gain = re.search(r"norm\d?\.weight$|\.[qk]_weight$", name)
            wanted = oracle_adamw(before, own, used, 0.1 if gain else 0.0)
        moved = np.abs(wanted - before).max()
        difference = np.abs(np.asarray(got, np.float64) - wanted).max()
        assert difference <= 2e-4 * moved, (name, difference, moved)
        assert moved > 0 or "gate.bias" in name, name


def _short(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """At most two layers and two experts: numpy takes one matrix after another."""
    stacked = len(shape) - 2 if path[-1] in ("weight", "fn") else 0
    return (*(min(2, count) for count in shape[:stacked]), *shape[stacked:])


def _is_table(path: tuple[str, ...]) -> bool:
    return path[0] == "engram" and path[2] == "embed"


def test_head_wise_is_muon_of_every_head():
    random = np.random.default_rng(1)
    gradient = random.standard_normal((3, 4 * 8, 24), np.float32)  # three layers, four heads of 8
    gradient[:, :8] *= 100  # which would leave the other heads almost nothing of a whole matrix
    cut, whole = (scale_by_muon(OptimizerSettings(), lambda name, n=n: n) for n in (4, 1))

    @jax.jit
    def both(x):
        heads = {f"{layer}.{head}": x[layer, 8 * head : 8 * head + 8] for layer in range(3) for head in range(4)}
        return cut.update({"w": x}, cut.init({"w": x}))[0]["w"], whole.update(heads, whole.init(heads))[0]

    got, heads = both(gradient)
    for layer in range(3):
        for head in range(4):
            own = got[layer, 8 * head : 8 * head + 8]
            # The same sums, batched otherwise; an update has numbers near 0.18 * sqrt(24) / sqrt(24).
            np.testing.assert_allclose(own, heads[f"{layer}.{head}"], atol=1e-5)
            singular = np.linalg.svd(own, compute_uv=False) / (0.18 * math.sqrt(24))
            np.testing.assert_allclose(singular, 1, atol=1e-3)  # two steps of (2, -1.5, 0.5) end at 1


def test_nothing_is_divided_by_zero():
    zero = jnp.zeros((2, 4, 6))
    assert not np.any(orthogonalize(zero))
    half = jnp.zeros((4, 6)).at[1, 2].set(1e-12)
    half = half.at[3].set(1e-12)
    assert np.isfinite(sinkhorn.balanced(half, OptimizerSettings())).all()  # empty columns and rows stay empty
    assert not np.any(sinkhorn.balanced(zero[0], OptimizerSettings()))
    half_precision = orthogonalize(jnp.asarray(np.random.default_rng(0).standard_normal((8, 16))), jnp.bfloat16)
    np.testing.assert_allclose(np.linalg.svd(half_precision, compute_uv=False), 1, atol=0.05)  # 8 bits, ten steps


@pytest.mark.parametrize("size", [1e-10, 1e-18, 1e-19, 1e-20, 3e-21, 1e-22, 1e-30, 1e20, 1e30])
def test_the_size_of_a_momentum_does_not_matter(size):
    """Squares of numbers below 1e-19 are zero in float32: what decays for lack of gradients must not be blown up."""
    x = np.random.default_rng(1).standard_normal((3, 8, 16)).astype(np.float32)
    np.testing.assert_allclose(orthogonalize(jnp.asarray(x * np.float32(size))), orthogonalize(x), atol=2e-3)


def test_sinkhorn_ends_with_rows_of_one_length_and_columns_nearly():
    random = np.random.default_rng(2)
    gradient = np.exp(random.standard_normal((500, 1)) * 2) * random.standard_normal((500, 32))
    gradient *= np.exp(random.standard_normal(32))  # rows and columns of very unlike lengths
    gradient[7] = 0
    norms = np.linalg.norm(gradient, axis=1)
    gradient[9] *= 1e-3 * norms.mean() / norms[9] / 2
    kept = np.linalg.norm(gradient, axis=1) > 1e-3 * norms.mean()
    optimizer = sinkhorn.scale_by_sinkhorn(OptimizerSettings())
    update, _ = optimizer.update({"w": jnp.asarray(gradient, jnp.float32)}, optimizer.init({"w": jnp.zeros((500, 32))}))
    rows = np.linalg.norm(update["w"], axis=1) / (0.18 * math.sqrt(32))
    columns = np.linalg.norm(update["w"], axis=0) / (0.18 * math.sqrt(32))
    assert not kept[7] and not kept[9] and kept.sum() > 450
    np.testing.assert_allclose(rows, kept, rtol=1e-5)  # float32; the last step is one of rows
    np.testing.assert_allclose(columns, math.sqrt(kept.sum() / 32), rtol=0.02)  # five steps of columns came before


def test_sparse_rows_move_as_the_dense_rule_says():
    """Ten steps of a table of 50 rows and 7 of padding, in tiles of 16, with rows named twice and rows never named."""
    random = np.random.default_rng(3)
    settings = OptimizerSettings(sinkhorn_threshold=0.2)  # so that decayed rows fall below it within ten steps
    table, momentum = np.zeros((57, 8), np.float32), jnp.zeros((57, 8), jnp.float32)
    table[:50] = random.standard_normal((50, 8))
    oracle = OracleTable(table[:50], threshold=0.2)
    step = jax.jit(
        lambda *a, apply: sinkhorn.update_rows(*a, 0.01, settings, rows=50, apply=apply, tile=16), donate_argnums=(0, 1)
    )
    first, table = table.copy(), jnp.asarray(table)
    for number in range(10):
        ids = random.integers(0, 30 if number < 5 else 10, 40).astype(np.int32)
        ids[:3] = ids[3]
        gradients = random.standard_normal((40, 8), np.float32) * 1e-4
        oracle.step(ids, gradients, 5 * 0.01)
        ids = np.concatenate([ids, np.array([-1, 57, 99], np.int32)])  # of other devices
        gradients = np.concatenate([gradients, np.ones((3, 8), np.float32)])
        table, momentum = step(table, momentum, ids, gradients, apply=True)
        if number == 4:  # a step that is left out changes nothing
            kept = np.array(table), np.array(momentum)
            table, momentum = step(table, momentum, ids, gradients * np.nan, apply=False)
            np.testing.assert_array_equal(table, kept[0])
            np.testing.assert_array_equal(momentum, kept[1])
    # float32 against float64 over eleven normalisations and ten steps of up to 0.01 * 5 * 0.18 * sqrt(8).
    np.testing.assert_allclose(table[:50], oracle.table, atol=2e-6)
    np.testing.assert_allclose(momentum[:50], oracle.momentum, atol=1e-10)
    np.testing.assert_array_equal(table[50:], 0)
    np.testing.assert_array_equal(table[30:50], first[30:50])  # never named: no momentum, no decay
    untouched = np.asarray(momentum[10:30])  # last named five steps ago at the latest, and decayed since
    assert np.all(np.abs(untouched) <= 0.95**5 * 40 * 5e-6)
    with pytest.raises(ValueError, match="rows=None"):
        sinkhorn.update_rows(table, momentum, ids, gradients, 0.01, settings, axes="data")


def test_a_table_is_changed_in_place():
    """Beside table and momentum, which are donated, one number a row and a few copies of the gradients."""
    rows, width, count = 1 << 20, 64, 1 << 10
    spec = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    given = jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((count, width), jnp.float32)
    step = jax.jit(lambda *a: sinkhorn.update_rows(*a, 0.01, OptimizerSettings(), tile=1 << 12), donate_argnums=(0, 1))
    memory = step.lower(spec, spec, *given).compile().memory_analysis()
    table = 4 * rows * width
    assert memory.alias_size_in_bytes == 2 * table
    assert memory.temp_size_in_bytes < table / 8  # 4 bytes a row twice are 1/32, tiles and gradients little more


def test_schedule_of_the_report():
    rate = Schedule.of(OptimizerSettings(), 100_663_296)
    start, end = 28e12 / 100_663_296, 40e12 / 100_663_296
    middle = 2.6e-5 + (2.6e-4 - 2.6e-5) / 2
    steps = [0, 999, 1999, 2000, math.floor(start), (start + end) / 2, math.ceil(end), 447_034]
    wanted = [1.3e-7, 1.3e-4, 2.6e-4, 2.6e-4, 2.6e-4, middle, 2.6e-5, 2.6e-5]
    np.testing.assert_allclose([rate(step) for step in steps], wanted, rtol=1e-5)
    assert [bool(rate.decays(step)) for step in (0, int(start) - 1, int(start) + 1)] == [False, False, True]
    assert Schedule.of(dataclasses.replace(SHORT, warmup_steps=0), 1)(0) == np.float32(0.02)
    with pytest.raises(ValueError, match="before the end of the warm-up"):
        Schedule.of(OptimizerSettings(), int(1e12))


@pytest.mark.parametrize("name", ["tiny", "demo", "flash"])
def test_every_parameter_has_a_rule(name):
    config, settings = load_config(CONFIGS / f"{name}.py"), OptimizerSettings()
    params = abstract_params(config, FLOAT32)
    rows = rules_table(params, config, settings)
    leaves = {".".join(path): leaf for path, leaf in flatten(params)}
    assert sorted(row.path for row in rows) == sorted(leaves)
    by_path = {row.path: row for row in rows}
    for path, row in by_path.items():  # by shape: matrices and nothing else are Muon's, but for the embeddings
        stacked = path.split(".")[0] in ("layers", "compressors", "indexers") or path.startswith(
            ("mtp.layers", "vision.blocks")
        )
        matrix = leaves[path].ndim - stacked >= 2 and not path.endswith(("q_weight", "k_weight"))
        assert matrix == row.group.startswith(("Muon", "Sinkhorn")), row
        assert row.decay == (0.1 if row.group.startswith(("Muon", "AdamW, norm")) else 0), row
    assert {p for p, r in by_path.items() if r.group.startswith("not by")} == {p for p in leaves if "gate.bias" in p}
    tables = [p for p in leaves if p.startswith("engram") and "embed" in p]
    assert tables and all(by_path[p].rate == 5 and by_path[p].group.endswith("sparse rows") for p in tables)
    assert by_path["layers.attn.wq_b.weight"].matrices == config.num_hidden_layers * config.num_attention_heads
    assert by_path["compressors.r1.wk.weight"].matrices == 1
    vision = [p for p in leaves if p.startswith("vision.")]
    assert {p for p, r in by_path.items() if "from the decay" in r.group} == set(vision) - {"vision.norm.weight"}
    text = format_rules(rows)
    assert all(p in text for p in leaves) and "Sinkhorn-balanced momentum: 4 tensors" in text


def test_rules_can_be_moved_and_mistakes_are_named():
    moved = OptimizerSettings(adamw=("*.hc_*.fn", "layers.ffn.gate.weight"))
    found = dict(flatten(labels(abstract_params(TINY, FLOAT32), moved)))
    assert found["layers", "hc_attn", "fn"] == found["mtp", "layers", "hc_ffn", "fn"] == "vector"
    assert found["layers", "ffn", "gate", "weight"] == "vector"
    assert found["mtp", "layers", "ffn", "gate", "weight"] == "muon"
    with pytest.raises(ValueError, match="'.*hc_fn' is no matrix of this model"):
        make_optimizer(OptimizerSettings(adamw=("*.hc_fn",)), TINY, Schedule.of(SHORT, 1))
    optimizer = make_optimizer(SHORT, TINY, Schedule.of(SHORT, 1))
    with pytest.raises(ValueError, match="params.surprise: no optimizer rule"):
        optimizer.init({"surprise": jnp.zeros(2)})
    with pytest.raises(ValueError, match="params.engram.l1.embed.weight: leave Engram tables out"):
        optimizer.init({"engram": {"l1": {"embed": {"weight": jnp.zeros((4, 2))}}}})
    with pytest.raises(ValueError, match="sinkhorn_steps=10: an odd number"):
        OptimizerSettings(sinkhorn_steps=10)
    with pytest.raises(ValueError, match="decay_end=1.0: at least"):
        OptimizerSettings(decay_start=2.0, decay_end=1.0)


def test_momentum_in_half_precision():
    """bfloat16 keeps 8 bits of the momentum: after three steps updates point within 1% of where float32 points."""
    random = np.random.default_rng(4)
    given = [random.standard_normal((12, 16), np.float32) for _ in range(3)]
    ids = jnp.arange(12)
    results = []
    for dtype in ("float32", "bfloat16"):
        settings = OptimizerSettings(momentum_dtype=dtype)
        tree = {"w": jnp.zeros((12, 16))}
        rules = scale_by_muon(settings, lambda name: 1), sinkhorn.scale_by_sinkhorn(settings)
        states = [rule.init(tree) for rule in rules]
        table, momentum = tree["w"], tree["w"].astype(dtype)
        for gradient in given:
            moved = [rule.update({"w": gradient}, state) for rule, state in zip(rules, states, strict=True)]
            states = [state for _, state in moved]
            table, momentum = sinkhorn.update_rows(table, momentum, ids, gradient, 1.0, settings)
        assert {x.dtype for x in (momentum, *jax.tree.leaves(states))} == {jnp.dtype(dtype)}
        results.append([*(update["w"] for update, _ in moved), table])
    for exact, rounded in zip(*results, strict=True):
        assert np.linalg.norm(exact - rounded) < 0.01 * np.linalg.norm(exact)
        assert np.any(exact != rounded)


def test_norm_and_clipping():
    gradients = {
        "layers": {"ffn": {"gate": {"bias": jnp.full((1, 2), 9.0)}}},
        "vision": {"norm": {"weight": jnp.full(1, 2.0)}},
    }
    gradients["vision"]["patch_embed"] = {"proj": {"bias": jnp.full(3, 7.0)}}
    schedule = Schedule.of(SHORT, 1)
    kept = [global_norm(trained_gradients(gradients, SHORT, schedule, jnp.int32(step))) for step in (3, 4)]
    np.testing.assert_allclose(kept, [2, math.sqrt(4 + 3 * 49)], rtol=1e-6)  # the vision encoder waits until step 4
    rows = jnp.asarray([[1.0, 0.0], [2.0, 0.0], [5.0, 5.0]])  # row 3 twice: 3; the last is outside of the table
    norm = global_norm({"w": jnp.asarray([4.0])}, [(jnp.asarray([3, 3, 10]), rows, 10)])
    np.testing.assert_allclose(norm, 5, rtol=1e-6)
    clipped = dataclasses.replace(SHORT, clip_norm=1.0)
    assert clip_factor(norm, SHORT) == 1
    np.testing.assert_allclose([clip_factor(norm, clipped), clip_factor(norm / 10, clipped)], [0.2, 1], rtol=1e-6)


def test_spikes_are_left_out():
    settings = dataclasses.replace(SHORT, skip_spikes=True, spike_window=5, spike_limit=3)
    judge = jax.jit(lambda *a: spikes.judge(*a, settings))
    state, random = spikes.new_spike_state(), np.random.default_rng(0)
    for loss in 3 + 0.1 * random.standard_normal(20):
        taken, state = judge(state, loss, 1.0)
        assert taken
    mean = float(state.mean)
    np.testing.assert_allclose(mean, 3, atol=0.2)
    for loss, norm in ((np.nan, 1.0), (3.0, np.inf), (3.0, 30.0)):
        taken, state = judge(state, loss, norm)
        assert not taken and state.mean == mean
    assert (state.skipped, state.in_a_row) == (3, 3)
    assert judge(state, 9.0, 1.0)[0]  # three in a row: the loss has moved for good
    assert not judge(state, np.nan, 1.0)[0]
    taken, state = judge(state, 3.0, 1.0)
    assert taken and (state.skipped, state.in_a_row, state.taken) == (3, 0, 1)
    off, unchanged = spikes.judge(state, jnp.float32(np.nan), jnp.float32(1), SHORT)
    assert off and unchanged is state
    tree = {"a": jnp.ones(2)}
    assert np.all(spikes.keep(False, {"a": tree["a"] * np.nan}, tree)["a"] == 1)


def test_a_mesh_gives_what_one_device_gives():
    fake_devices.run_case("optimizer_mesh", "same_updates", "2x2x2")
