"""Mixture and packing: best fit, nothing lost, shares of tokens, and positions that are restored exactly."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_jax.training.packing import Packer
from dsv41_jax.training.records import Document, StoredImage
from training_data import Listed, mixture, of_lengths, pipeline, random_documents, write_documents


def lengths(rows) -> list[list[int]]:
    return [[len(piece) for piece in row.pieces] for row in rows]


def packed(documents, length, open_rows, fill, **options) -> list:
    return list(Packer(mixture([Listed(documents)]), length, open_rows, fill, **options))


def test_a_document_goes_where_it_leaves_the_least_room():
    # First fit would put the 3 beside the 6.
    assert lengths(packed(of_lengths(6, 7, 3, 4), 10, 2, False)) == [[7, 3], [6, 4]]


def test_the_fullest_row_is_closed_with_padding_or_filled_with_a_split_document():
    assert lengths(packed(of_lengths(6, 8, 5, 2, 4), 10, 2, False)) == [[8], [6, 2], [5, 4]]
    assert lengths(packed(of_lengths(6, 8, 5, 2, 4), 10, 2, True)) == [[8, 2], [6, 3], [2, 4]]


@pytest.mark.parametrize("fill", [False, True])
def test_a_document_longer_than_a_row_fills_rows_of_its_own(fill):
    rows = lengths(packed(of_lengths(3, 25, 5), 10, 2, fill))
    assert rows == [[10], [10], [3, 5], [5]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 5), st.booleans())
def test_every_token_is_in_one_row_once(sizes, open_rows, fill):
    rows = packed(of_lengths(*sizes), 16, open_rows, fill)
    seen = defaultdict(list)
    for row in rows:
        assert 0 < row.tokens == sum(map(len, row.pieces)) <= 16
        for piece in row.pieces:
            seen[piece.drawn.position].append((piece.start, piece.stop))
    for position, size in enumerate(sizes):
        ranges = sorted(seen[position])
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == size
        if not fill and size <= 16:
            assert len(ranges) == 1
    if fill:
        assert all(row.tokens == 16 for row in rows[: -open_rows or None])


def test_filled_rows_have_no_padding_and_others_little(tmp_path):
    folder = write_documents(tmp_path / "a", random_documents(400, 20))
    shares = {}
    for split in ("fill", "none"):
        made = pipeline(folder, length=128, split=split, open_rows=16)
        for _ in range(40):
            next(made)
        shares[split] = made.statistics()["padding_share"]
    assert shares["fill"] == 0
    assert 0 < shares["none"] < 0.01


def test_the_padding_share_is_counted(tmp_path):
    folder = write_documents(tmp_path / "a", of_lengths(20, 21, 22, 23, 24, 25), shards=1)
    made = pipeline(folder, split="none", open_rows=1, shuffle=False, epochs=1, add_eos=False)
    batches = list(made)  # each with BOS in a row of 32
    assert [(b["weights"] > 0).sum() for b in batches] == [20 + 21 + 22 + 23, 24 + 25]
    statistics = made.statistics()
    assert (statistics["rows"], statistics["tokens"]) == (6, 21 + 22 + 23 + 24 + 25 + 26)
    assert statistics["padding_share"] == pytest.approx(1 - 141 / (6 * 32))
    assert (batches[1]["weights"][2:] == 0).all() and (batches[1]["segment_ids"][2:] == 0).all()


def test_shares_of_tokens_follow_the_weights():
    sources = [Listed(random_documents(50, mean, seed)) for seed, mean in enumerate((40, 5))]
    stream = mixture(sources, (7.0, 1.0), epochs=0, shuffle=True)
    for _ in range(600):
        next(stream)
    longest = max(len(d.token_ids) for s in sources for d in s.documents)
    assert abs(stream.tokens[0] - 7 * stream.tokens[1]) <= 8 * longest  # never further behind than one document


def test_every_epoch_visits_each_document_once_in_another_order():
    documents = of_lengths(*range(1, 21))
    stream = mixture([Listed(documents)], epochs=2, shuffle=True, seed=4)
    sizes = [len(drawn.document.token_ids) for drawn in stream]
    assert sorted(sizes[:20]) == sorted(sizes[20:]) == list(range(1, 21))
    assert sizes[:20] != sizes[20:] and sizes[:20] != sorted(sizes[:20])
    other = mixture([Listed(documents)], epochs=1, shuffle=True, seed=5)
    assert [len(drawn.document.token_ids) for drawn in other] != sizes[:20]


def test_an_image_document_is_never_split_and_too_many_images_are_counted():
    def pictured(size: int, images: int, side: int = 2) -> Document:
        return Document(np.full(size, 7), None, (StoredImage(1, (side, side), b""),) * images)

    documents = [*of_lengths(6), pictured(7, 1), pictured(8, 3), pictured(12, 1), pictured(5, 1, 4), pictured(3, 2)]
    packer = Packer(mixture([Listed(documents)]), 10, 1, True, images=2, image_patches=4)
    assert lengths(packer) == [[6, 3], [7]]  # a row more than one is open for the 7, so that the 6 is not padded
    assert packer.skipped_images == 3
    documents = [pictured(6, 1), pictured(7, 1), pictured(8, 1), pictured(3, 2), *of_lengths(2)]
    packer = Packer(mixture([Listed(documents)]), 10, 1, True, images=2, image_patches=4)
    assert lengths(packer) == [[7], [8], [6, 2], [3]]
    with pytest.raises(ValueError, match="all 1 documents have images that no row takes: raise images_per_row"):
        next(Packer(mixture([Listed([pictured(5, 1)])], epochs=0), 10, 1, True))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restored_position_gives_the_same_batches(tmp_path, prefetch):
    paths = [
        write_documents(tmp_path / name, random_documents(60, mean, seed=mean)) for name, mean in (("a", 30), ("b", 9))
    ]
    options = {"prefetch": prefetch, "replay_probability": 0.4}
    made = pipeline(*paths, **options)
    states, batches = [], []
    for _ in range(30):  # several epochs of each
        states.append(json.dumps(made.get_state()))
        batches.append(next(made))
    made.close()
    again = pipeline(*paths, **options)
    for at in (17, 0, 1, 29, 8):  # back and forth
        again.set_state(json.loads(states[at]))
        assert json.dumps(again.get_state()) == states[at]
        for batch in batches[at : at + 3]:
            np.testing.assert_equal(next(again), batch)
    again.close()


def test_a_position_of_other_files_or_settings_is_refused(tmp_path):
    paths = [write_documents(tmp_path / name, random_documents(n, 9)) for name, n in (("a", 60), ("b", 61))]
    state = pipeline(paths[0]).get_state()
    with pytest.raises(ValueError, match="of other data files"):
        pipeline(paths[1]).set_state(state)
    with pytest.raises(ValueError, match=r"made with \{'length': 32\}, now \{'length': 64\}"):
        pipeline(paths[0], length=64).set_state(state)
    with pytest.raises(ValueError, match="format 0"):
        pipeline(paths[0]).set_state(state | {"format": 0})


@pytest.mark.parametrize("shards", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(tmp_path, shards):
    folder = write_documents(tmp_path / "a", random_documents(80, 25))
    options = {"replay_probability": 0.5}
    alone = pipeline(folder, **options)
    parts = [pipeline(folder, shard=i, shards=shards, **options) for i in range(shards)]
    for _ in range(8):
        whole, shared = next(alone), [next(part) for part in parts]
        for name in ("token_ids", "targets", "segment_ids", "weights", "replay"):
            np.testing.assert_array_equal(np.concatenate([part[name] for part in shared]), whole[name])
        np.testing.assert_array_equal(np.concatenate([part["memory"]["l0"] for part in shared]), whole["memory"]["l0"])
        assert all(part.get_state() == alone.get_state() for part in parts)
    with pytest.raises(ValueError, match="batch=4 rows cannot be shared out as shard 0 of 3"):
        pipeline(folder, shards=3)
