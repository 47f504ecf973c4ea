"""Any split of a prompt into blocks gives the same numbers, selections and state.

Tiny model A, layer by layer: its programs return every layer's selection, and are shared with other files.
"""

import numpy as np
import pytest

import dsv41_jax as ds
from layer_by_layer import LayerByLayer, layers
from stored import stored_entries
from tiny_golden import FLOAT32_ATOL, INDEX_SOURCES, prompt

SHORT = 40


def read(model: ds.Model, ids: np.ndarray, cuts: tuple[int, ...] = ()) -> tuple[np.ndarray, LayerByLayer]:
    """Logits [n, V] of tokens read in the pieces between the cuts, and the run that read them."""
    run, edges = LayerByLayer(model), [0, *cuts, len(ids)]
    return np.concatenate([run.run(ids[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]), run


def entries(run: LayerByLayer) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Main KV and index keys of the complete groups, by source layer."""
    found = {}
    for layer in layers(run.config):
        ratio = layer.kind.ratio
        if layer.number in run.config.kv_source_layer_ids:
            stored = stored_entries(run.config, run.numerics, run.arrays, ratio, layer.kv_slot)
            found[layer.number] = tuple(x[: len(run.tokens) // ratio] for x in stored)
    return found


def assert_same(got: tuple[np.ndarray, LayerByLayer], want: tuple[np.ndarray, LayerByLayer]) -> None:
    n = len(got[0])
    np.testing.assert_allclose(got[0], want[0][:n], rtol=0, atol=FLOAT32_ATOL)
    np.testing.assert_array_equal(got[0].argmax(-1), want[0][:n].argmax(-1))
    for source in INDEX_SOURCES:
        np.testing.assert_array_equal(got[1].values["selection"][source], want[1].values["selection"][source][:n])


def assert_same_state(got: LayerByLayer, want: LayerByLayer) -> None:
    for source, pair in entries(got).items():
        for new, old in zip(pair, entries(want)[source], strict=True):
            np.testing.assert_allclose(new, old, rtol=0, atol=FLOAT32_ATOL)
    window = want.config.sliding_window
    slots = np.arange(len(got.tokens) - window, len(got.tokens)) % got.arrays.window["rows"].shape[2]
    np.testing.assert_allclose(
        got.arrays.window["rows"][:, :, slots], want.arrays.window["rows"][:, :, slots], rtol=0, atol=FLOAT32_ATOL
    )


@pytest.fixture(scope="module")
def whole(tiny):
    """The first 40 tokens of `long` in one block, float32."""
    return read(tiny("float32"), prompt("long")[0, :SHORT])


def test_every_length_is_a_beginning_of_the_longest(tiny, whole):
    """So that the cuts below stand for every length: what follows a token changes nothing before it."""
    for n in range(1, SHORT):
        got = read(tiny("float32"), prompt("long")[0, :n])
        assert_same(got, whole)
        if n % 7 == 0:  # complete groups only, whatever the parity
            for source, pair in entries(got[1]).items():
                for new, old in zip(pair, entries(whole[1])[source], strict=True):
                    np.testing.assert_allclose(new, old[: len(new)], rtol=0, atol=FLOAT32_ATOL)


@pytest.mark.parametrize("parity", [0, 1])
def test_cut_at_every_point(tiny, whole, parity):
    for cut in range(1 + parity, SHORT, 2):
        got = read(tiny("float32"), prompt("long")[0, :SHORT], (cut,))
        assert_same(got, whole)
        assert_same_state(got[1], whole[1])


def random_cuts(n: int, count: int, seed: int) -> tuple[int, ...]:
    return tuple(sorted(np.random.default_rng(seed).choice(np.arange(1, n), count, replace=False).tolist()))


def test_longer_prompt_cut_at_random_points(tiny):
    ids = prompt("long")[0]
    want = read(tiny("float32"), ids)
    for seed, count in enumerate((1, 2, 5, 11)):
        got = read(tiny("float32"), ids, random_cuts(len(ids), count, seed))
        assert_same(got, want)
        assert_same_state(got[1], want[1])


def shares(got: LayerByLayer, want: LayerByLayer) -> dict[int, float]:
    """Share of entries whose main KV and index key have the same bits, by source."""
    equal = {}
    for source, (main_kv, index_key) in entries(got).items():
        other = entries(want)[source]
        same = (main_kv == other[0]).all(axis=-1) & (index_key == other[1]).all(axis=-1)
        equal[source] = float(same.mean())
    return equal


def test_packed_entries_of_one_shot_and_split_prefill(tiny, record_property):
    """`released`: single tokens, short and long blocks. A flipped code may change what later sources see."""
    ids, model = prompt("long")[0], tiny("released")
    _, want = read(model, ids)
    _, got = read(model, ids, (1, 2, 3, 17, 40, 41, 97, 160))
    by_source = shares(got, want)
    record_property("equal entries by source", str(by_source))
    print("equal entries by source:", {source: f"{share:.3f}" for source, share in by_source.items()})
    assert by_source[min(by_source)] >= 0.99


def test_a_tail_that_is_lost_is_seen(tiny, whole):
    """Negative control: the raw row that waits for its partner."""
    run = LayerByLayer(tiny("float32"))
    ids = prompt("long")[0, :SHORT]
    first = run.run(ids[:7])
    tails = {name: 0 * tail for name, tail in run.arrays.tail_values.items()}
    run.arrays = run.arrays.replace(tail_values=tails)
    got = np.concatenate([first, run.run(ids[7:])]), run
    with pytest.raises(AssertionError):
        assert_same_state(got[1], whole[1])
