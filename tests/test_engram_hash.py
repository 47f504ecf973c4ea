"""Engram addresses against the golden ones and Python's integers; history, packing and refusals."""

import dataclasses

import numpy as np
import pytest

from dsv41_jax.engram_hash import DEAD, EngramHasher, segment_starts
from engram_golden import FACTS, GOLD, config_of, token_map_of

SEEDS = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["released", "small"])
def case(request) -> tuple[str, EngramHasher]:
    return request.param, EngramHasher(config_of(request.param), token_map_of(request.param))


def by_layer_last(rows: np.ndarray) -> np.ndarray:
    """[layers, B, T, columns] -> the fixture's [B, T, layers, columns]."""
    return rows.transpose(1, 2, 0, 3)


def test_hash_equals_golden(case):
    layout, hasher = case
    ids, alive = GOLD[f"{layout}.ids"], GOLD[f"{layout}.mask"]
    rows = hasher.hash(ids)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(by_layer_last(rows), GOLD[f"{layout}.hash"])
    masked = hasher.hash(np.where(alive, ids, DEAD))
    np.testing.assert_array_equal(by_layer_last(masked), GOLD[f"{layout}.hash_masked"])
    assert not alive.all()


def test_incremental_equals_one_shot_at_every_split(case):
    """Also with dead positions and sample boundaries in reach of the border, and into three parts."""
    layout, hasher = case
    ids = np.where(GOLD[f"{layout}.mask"], GOLD[f"{layout}.ids"], DEAD)
    length = ids.shape[1]
    starts = SEEDS.random(ids.shape) < 0.2
    for given in (None, starts):
        whole = hasher.hash(ids, starts=given)
        for cut in range(length + 1):
            history, parts = None, []
            for part in (slice(0, cut), slice(cut, cut + 1), slice(cut + 1, length)):
                part_starts = None if given is None else given[:, part]
                parts.append(hasher.hash(ids[:, part], history, part_starts))
                history = hasher.advance(ids[:, part], history, part_starts)
            np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole)


def test_packed_samples_hash_as_if_alone(case):
    layout, hasher = case
    ids = np.where(GOLD[f"{layout}.mask"], GOLD[f"{layout}.ids"], DEAD)
    lengths = (1, 2, 7, 1, 9)
    segment_ids = np.repeat(np.arange(len(lengths)), lengths)[None].repeat(2, axis=0)
    rows = hasher.hash(ids, starts=segment_starts(segment_ids))
    alone = [hasher.hash(part) for part in np.split(ids, np.cumsum(lengths)[:-1], axis=1)]
    np.testing.assert_array_equal(rows, np.concatenate(alone, axis=2))
    assert (rows != hasher.hash(ids)).any()


def test_ragged_rows_keep_their_own_history(case):
    layout, hasher = case
    ids = GOLD[f"{layout}.ids"]
    n_valid = np.array([1, 6])
    history = hasher.advance(ids[:, :8], n_valid=n_valid)
    for row, n in enumerate(n_valid):
        one = slice(row, row + 1)
        expected = hasher.hash(ids[one, : n + 3])[:, :, n:]
        np.testing.assert_array_equal(hasher.hash(ids[one, n : n + 3], history[one]), expected)


def test_raw_ids_are_compressed_and_images_block():
    hasher = EngramHasher(config_of("released"), token_map_of("released"))
    raw = np.array([[671, 20852, 129264, 455, 270]])  # The, THE, image, " The", " the"
    image = np.array([[False, False, True, False, False]])
    rows, history = hasher(raw, image)
    the, pad = 237, 2
    np.testing.assert_array_equal(hasher.compress(raw, image), [[the, the, DEAD, the, the]])
    np.testing.assert_array_equal(history, [[DEAD, the, the]])
    # A dead position is hashed as all pad, and so is everything behind it (spec 15.11).
    only_pads = hasher.hash(np.array([[pad, pad, pad, pad]]))[:, :, -1]
    np.testing.assert_array_equal(rows[:, :, 2], only_pads)
    np.testing.assert_array_equal(rows[:, :, 4], hasher.hash(np.array([[pad, pad, the, the]]))[:, :, -1])
    with pytest.raises(ValueError, match="token ids"):
        hasher.compress(np.array([[-1]]))
    with pytest.raises(ValueError, match="token ids"):
        hasher.compress(np.array([[129280]]))


def test_last_row_of_the_last_column_is_exact():
    """Pitfall 23: head 7 of the 4-grams reaches row 384,006,167, by products near 2^63; Python's integers agree."""
    config = config_of("released")
    hasher = EngramHasher(config, token_map_of("released"))
    layout = config.engram_layout
    assert layout.table_rows == (384_006_168, 384_016_682)
    multipliers = [int(m) for m in FACTS["released"]["multipliers"][0]]
    assert list(layout.multipliers[0]) == multipliers
    prime = layout.primes[0][-1]
    # The look-back 0..2 are fixed and high; the id three back is free. Take those that land highest in the last bucket.
    fixed = [99091, 99090, 99089]
    known = fixed[0] * multipliers[0] ^ fixed[1] * multipliers[1] ^ fixed[2] * multipliers[2]
    exact = [(known ^ (c * multipliers[3])) % prime + layout.offsets[0][-1] for c in range(99092)]
    best = int(np.argmax(exact))
    assert exact[best] > 384_006_168 - 1000 and 99091 * max(multipliers) > 2**62
    rows = hasher.hash(np.array([[best, *fixed[::-1]]]))
    assert int(rows[0, 0, -1, -1]) == exact[best]


def test_token_map_of_another_size_is_refused():
    """Pitfall 24: one compressed id more or fewer would move every address."""
    config, token_map = config_of("released"), token_map_of("released")
    merged = np.where(token_map == 99091, 0, token_map)
    with pytest.raises(ValueError, match="99091 compressed ids"):
        EngramHasher(config, merged)
    with pytest.raises(ValueError, match="vocabulary"):
        EngramHasher(config, token_map[:-1])
    with pytest.raises(ValueError, match="integers"):
        EngramHasher(config, token_map.astype(np.float32))


def test_layers_without_table_sizes_are_refused():
    """Pitfall 25: sizes are derived and compared when the config is made."""
    config = config_of("released")
    for sizes in ((), (384_006_168,), (384_006_168, 384_016_681)):
        with pytest.raises(ValueError, match="engram_num_embeddings"):
            dataclasses.replace(config, engram_num_embeddings=sizes)
    without = dataclasses.replace(config, engram_layer_ids=(), engram_num_embeddings=())
    with pytest.raises(ValueError, match="no Engram"):
        EngramHasher(without, token_map_of("released"))
