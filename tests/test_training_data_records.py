"""Records and sources: round trips, and what happens to bytes that are not what was written."""

from __future__ import annotations

import numpy as np
import pytest

from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.records import CorruptRecordError, Document, StoredImage, decode_document, encode_document
from dsv41_jax.training.sources import open_source
from training_data import BOS, EOS, of_lengths, pipeline, random_documents, write_documents, write_shard


@pytest.mark.parametrize(
    "document",
    [
        Document(np.array([], np.int64)),
        Document(np.array([5, 65535]), 1),
        Document(np.array([5, 65536, 129279]), 0),
        Document(np.full(40, 9), 3, (StoredImage(1, (4, 6), b"png"), StoredImage(30, (300, 1), b""))),
    ],
)
def test_a_record_holds_its_document(document):
    record = encode_document(document)
    again = decode_document(record)
    np.testing.assert_array_equal(again.token_ids, document.token_ids)
    assert (again.token_ids.dtype, again.prompt_length, again.images) == (
        np.int32,
        document.prompt_length,
        document.images,
    )
    for at in range(len(record)):  # any one byte
        with pytest.raises(CorruptRecordError):
            decode_document(record[:at] + bytes([record[at] ^ 4]) + record[at + 1 :])
    with pytest.raises(CorruptRecordError):
        decode_document(record[:-1])


def test_framing_adds_what_is_missing_and_moves_what_it_should():
    document = Document(np.array([7, 8]), 1, (StoredImage(1, (1, 1), b""),))
    framed = document.framed(BOS, EOS)
    assert framed.token_ids.tolist() == [BOS, 7, 8, EOS]
    assert (framed.prompt_length, framed.images[0].start) == (2, 2)
    assert framed.framed(BOS, EOS).token_ids.tolist() == [BOS, 7, 8, EOS]
    assert document.framed(None, None).token_ids.tolist() == [7, 8]


@pytest.fixture
def damaged(tmp_path):
    """Twelve documents: one record with a wrong byte of its own, one whose bytes the file lost."""
    documents = of_lengths(*range(10, 22))
    records = [encode_document(document) for document in documents]
    records[3] = records[3][:-1] + b"\x55"
    file = write_shard(tmp_path / "a/00000.array_record", records)
    content = bytearray(file.read_bytes())
    at = content.index(records[8])
    content[at + 20] ^= 0xFF
    file.write_bytes(content)
    return file


def test_corrupt_records_are_skipped_and_counted(damaged):
    options = {"on_corrupt": "skip", "epochs": 1, "shuffle": False, "add_bos": False, "add_eos": False}
    made = pipeline(damaged.parent, **options)
    kept = np.concatenate([batch["token_ids"][batch["token_ids"] != 2] for batch in made])
    assert set(kept.tolist()) == {4 + i for i in range(12)} - {7, 12}
    assert made.statistics()["corrupt_records"] == 2
    again = pipeline(damaged.parent, **options)
    again.set_state(made.get_state())
    assert again.statistics() == made.statistics()


def test_a_corrupt_record_stops_the_run_and_is_named(damaged):
    for prefetch in (0, 1):
        made = pipeline(damaged.parent, on_corrupt="stop", epochs=1, shuffle=False, prefetch=prefetch)
        with pytest.raises(CorruptRecordError, match=r"00000.array_record: record 3 is corrupt: the checksum"):
            list(made)
        made.close()


def test_files_without_one_good_record_end_the_run(tmp_path):
    write_shard(tmp_path / "a/00000.array_record", [b"not a record"] * 3)
    with pytest.raises(ValueError, match="none of its 3 documents has tokens .3 of them are corrupt"):
        next(pipeline(tmp_path / "a", on_corrupt="skip"))


def test_what_is_no_data_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"launch/tokenize.py writes them"):
        pipeline(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none.npy: no such file"):
        pipeline(tmp_path / "none.npy")
    (tmp_path / "00000.array_record").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="not a whole ArrayRecord file, tokenise it again"):
        pipeline(tmp_path)
    np.save(tmp_path / "a.npy", np.array([5, BOS, 4]))
    with pytest.raises(ValueError, match="integers .n. that begin with BOS"):
        pipeline(tmp_path / "a.npy")
    write_documents(tmp_path / "b", [Document(np.array([4, 640]))], shards=1)
    with pytest.raises(ValueError, match="b: token id 640, but the model has 64"):
        next(pipeline(tmp_path / "b"))


def test_a_token_array_is_cut_at_every_bos_and_kept_as_it_is(tmp_path):
    parts = [[BOS, 5, 6], [BOS, 7, EOS], [BOS], [BOS, 8, 9, 10]]
    np.save(tmp_path / "a.npy", np.array(sum(parts, []), np.uint16))
    source = open_source(str(tmp_path / "a.npy"), BOS, "a")
    assert [source[i].token_ids.tolist() for i in range(len(source))] == parts
    batch = next(pipeline(tmp_path / "a.npy", shuffle=False, epochs=1, batch=1, length=16))
    assert batch["token_ids"][0, :11].tolist() == sum(parts, [])
    assert batch["segment_ids"][0, :12].tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4]


def test_shards_are_one_source_whatever_pattern_names_them(tmp_path):
    documents = random_documents(31, 5)
    folder = write_documents(tmp_path / "a", documents, shards=3)
    by_pattern = open_source(str(folder / "000*"), BOS, "a")
    whole = open_source(str(folder), BOS, "a")
    assert by_pattern.fingerprint == whole.fingerprint
    assert len(open_source(str(folder / "00001.array_record"), BOS, "a")) == 11
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(whole[i].token_ids, document.token_ids)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "at least one source"),
        ({"sources": [{"path": ""}]}, r"sources\[0\]: path='': a file or a folder"),
        ({"sources": [{"path": "a", "weight": 0}]}, "weight=0"),
        ({"sources": [{"path": "a"}], "lenght": 5}, r"unknown settings \['lenght'\]"),
        ({"sources": [{"path": "a"}], "split": "half"}, "split='half' is unknown; choose one of fill, none"),
        ({"sources": [{"path": "a"}], "replay_probability": 1.5}, "replay_probability=1.5"),
    ],
)
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DataSettings.of(values)
