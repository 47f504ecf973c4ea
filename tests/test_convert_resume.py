"""A conversion that is killed goes on where it was, and ends as one that was not killed."""

import hashlib
import json
import os
import random
import shutil
import time

import numpy as np
import pytest

from convert_child import Child, run
from dsv41_jax.checkpoint import conversion, transfer
from dsv41_jax.checkpoint.process_lock import hold
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import read_header
from launch.convert import main
from oracle_weights import read_safetensors, write_safetensors

SEED = 20


@pytest.fixture(scope="module")
def released(tiny_folder, golden, tmp_path_factory):
    """Tiny model A with a token map in its folder."""
    path = tmp_path_factory.mktemp("resume") / "tiny"
    shutil.copytree(tiny_folder, path)
    np.save(path / "token_map.npy", np.load(golden / "tinyA_token_map.npz")["token_map"])
    return path


@pytest.fixture(scope="module")
def uninterrupted(released):
    """(result, steps) of a conversion to Orbax that nothing disturbed."""
    folder = released.with_name("whole")
    folder.mkdir()
    whole = run([released, folder / "model", "--to=orbax"], folder)
    assert whole.code == 0, whole.shown
    return folder / "model", whole.steps


def digest(folder):
    """{file: hash of its bytes} of a whole folder."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def assert_equal_to(whole, folder, target="model"):
    assert [file.name for file in folder.iterdir()] == [target], "something is left over"
    assert digest(folder / target) == digest(whole)


def test_killed_twice_and_run_again(released, uninterrupted, tmp_path):
    whole, steps = uninterrupted
    points = [random.Random(SEED).randrange(steps // 4, steps // 2) for _ in range(2)]
    for point in points:
        killed = run([released, tmp_path / "model", "--to=orbax"], tmp_path, kill_at=point)
        assert killed.code == -9 and not (tmp_path / "model").exists()
    assert "are done already and are skipped" in killed.shown  # the second kill
    again = run([released, tmp_path / "model", "--to=orbax"], tmp_path)
    assert again.code == 0 and "are done already and are skipped" in again.shown
    assert_equal_to(whole, tmp_path)


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_while_it_completes_the_folder(released, uninterrupted, every, tmp_path):
    """All tensors are there; the last steps write Orbax's metadata and the checksums, and give the folder its name."""
    whole, _ = uninterrupted
    argv = [str(released), str(tmp_path / "new/model"), "--to=orbax"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "copy_text_files", lambda *_: (_ for _ in ()).throw(OSError("broke off")))
        assert main(argv) == 1
    (tmp_path / "new").rename(tmp_path / "begun")

    def complete(kill_at=None):
        shutil.copytree(tmp_path / "begun", tmp_path / "new")
        return run(argv, tmp_path / "new", kill_at=kill_at)

    last = complete().steps
    for point in range(last - 12 + every, last + 1, every):
        assert_equal_to(whole, tmp_path / "new")
        shutil.rmtree(tmp_path / "new")
        assert complete(kill_at=point).code == -9
        again = run(argv, tmp_path / "new")
        assert again.code == 0 and "converting" not in again.shown.replace("converting tiny: 100%", "")
    assert "complete already" in again.shown  # the last kill came after the name


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orbax", "released"])
def test_killed_at_ten_random_points(released, uninterrupted, to, tmp_path):
    source = released if to == "orbax" else uninterrupted[0]
    flags = [f"--to={to}", "--shard_bytes=1000000"]
    (tmp_path / "whole").mkdir()
    whole = run([source, tmp_path / "whole/model", *flags], tmp_path / "whole")
    assert whole.code == 0
    points = random.Random(SEED).sample(range(2, whole.steps), 10)
    for point in points:
        folder = tmp_path / f"at-{point}"
        folder.mkdir()
        argv = [source, folder / "model", *flags]
        assert run(argv, folder, kill_at=point).code == -9, point
        again = run(argv, folder)
        assert again.code == 0, again.shown
        assert_equal_to(tmp_path / "whole/model", folder)


@pytest.mark.slow
def test_killed_at_random_times(released, uninterrupted, tmp_path):
    """From outside, so in the middle of a write too, and several times in one conversion."""
    whole, _ = uninterrupted
    chance, kills, finished = random.Random(SEED), 0, 0
    while kills < 10 or not finished:
        child = Child([released, tmp_path / "new/model", "--to=orbax"], tmp_path)
        child.process.join(chance.uniform(0.05, 0.6) if kills < 10 else 60)
        child.process.kill()
        code = child.result().code
        kills += code == -9
        if code == 0:
            finished += 1
            assert_equal_to(whole, tmp_path / "new")
            shutil.rmtree(tmp_path / "new")


# --- what a second run does ------------------------------------------------------------------------------------------


@pytest.fixture
def begun(released, tmp_path, capsys, monkeypatch):
    """A conversion of a copy of the model that broke off after 300 pieces; returns its command line."""
    source = shutil.copytree(released, tmp_path / "source")
    argv, moved = [str(source), str(tmp_path / "model"), "--to=orbax"], []

    def crc32(rows, whole=transfer.crc32):
        moved.append(whole(rows))
        if len(moved) > 300:
            raise OSError("broke off")
        return moved[-1]

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "COMMIT_SECONDS", 0)
        patch.setattr(transfer, "crc32", crc32)
        assert main(argv) == 1
    assert "broke off" in capsys.readouterr().err
    return argv


def test_what_is_done_is_not_read_again(begun, uninterrupted, tmp_path, capsys, monkeypatch):
    (journal,) = (tmp_path / ".model.partial/.progress").glob("*.jsonl")
    done = {json.loads(line)[0] for line in journal.read_text().splitlines() if line.startswith("[")}
    read, rows = [], ReleasedFolder.rows
    monkeypatch.setattr(ReleasedFolder, "rows", lambda *args: read.append(args[1]) or rows(*args))
    assert main(begun) == 0
    assert len(done) >= 290 and not done & set(read) and len(done) + len(read) == 1016
    assert f"({len(done)} of 1016 pieces) are done already and are skipped" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "source")
    found, wanted = digest(tmp_path / "model"), digest(uninterrupted[0])
    found.pop("checksums.json"), wanted.pop("checksums.json")  # names its source
    assert found == wanted


def test_a_journal_that_was_cut_short_or_damaged(begun, tmp_path):
    (journal,) = (tmp_path / ".model.partial/.progress").glob("*.jsonl")
    lines = journal.read_text().splitlines()
    damage = ["", lines[40][: len(lines[40]) // 2], '["norm.weight", 0]', "[[], 0, 1, 2]", "\0\0\0", "7"]
    journal.write_text("\n".join([*lines[:40], *damage, *lines[41:200], lines[200][:20]]))
    assert main([*begun, "--verify"]) == 0


def change_size(file):
    tensors = read_safetensors(file)
    tensors["mtp.0.embed.weight"] = np.zeros(3, np.float32)  # allowed, and not used
    write_safetensors(file, tensors)


def change_header(file):
    """Two tensors change places; size and times stay."""
    times, data = file.stat(), file.read_bytes()
    first, second = (f'"layers.{i}.attn.wkv.weight"'.encode() for i in (0, 1))
    data = data.replace(first, b"*" * len(first)).replace(second, first).replace(b"*" * len(first), second)
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def change_value(file):
    """A bit of the embedding, which is among what is done."""
    entry = read_header(file)[0]["embed.weight"]
    data = bytearray(file.read_bytes())
    data[entry.offset + 100] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("change", [change_size, change_header, change_value])
def test_a_source_that_has_changed_is_refused(begun, change, tmp_path, capsys):
    change(tmp_path / "source/model.safetensors")
    assert main(begun) == 1
    shown = capsys.readouterr()
    if change is change_value:
        assert "have other times than then" in shown.out
        assert "embed.weight in" in shown.err and "the source has changed since it was converted" in shown.err
    else:
        assert "begun as another conversion: model.safetensors: was" in shown.err
    assert "to begin anew" in shown.err
    shutil.rmtree(tmp_path / ".model.partial")
    assert main(begun) == 0


def test_a_source_with_new_times_and_the_same_bytes_goes_on(begun, tmp_path, capsys, monkeypatch):
    (tmp_path / "source/model.safetensors").touch()
    monkeypatch.setattr(transfer, "transfer", lambda *_: None)
    assert main(begun) == 0
    shown = capsys.readouterr()
    assert "what is done is compared" in shown.out and "comparing: 100%" in shown.err


def test_a_source_that_changes_under_way(begun, tmp_path, capsys, monkeypatch):
    """Not completed; the next run compares, and finds the piece that is of the old source."""
    record = conversion.PartialFolder.record

    def change_then_record(partial, pieces):
        if (tmp_path / "source/model.safetensors").stat().st_mtime_ns == before:
            change_value(tmp_path / "source/model.safetensors")
        record(partial, pieces)

    before = (tmp_path / "source/model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(conversion.PartialFolder, "record", change_then_record)
        assert main(begun) == 1
    assert "were written to while they were converted" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert main(begun) == 1
    assert "embed.weight in" in capsys.readouterr().err


def test_interrupted_from_the_keyboard(begun, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "transfer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(begun) == 130
    assert "what is done is kept: run the same command to go on" in capsys.readouterr().err
    assert main(begun) == 0


def test_other_options_are_another_conversion(begun, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(conversion.cut, "PIECE_BYTES", 4096)
    assert main(begun) == 1
    assert "piece_bytes: was" in capsys.readouterr().err


def test_two_at_once_are_refused(begun, tmp_path, capsys):
    with hold(tmp_path / ".model.partial.lock-0"):
        start = time.monotonic()
        assert main(begun) == 1
        assert time.monotonic() - start < 10
    assert f"is being written already, by process {os.getpid()} on" in capsys.readouterr().err
    assert main(begun) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"source", "model"}


def test_a_full_disk(begun, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "transfer", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert main(begun) == 1
    assert "the disk is full; what is done is kept: make room" in capsys.readouterr().err
    # What is done need not fit again.
    free = type("Usage", (), {"free": 4_200_000})
    with monkeypatch.context() as patch:
        patch.setattr(conversion.shutil, "disk_usage", lambda _: free)
        assert main([begun[0], str(tmp_path / "other"), "--to=orbax"]) == 1
        assert main(begun) == 0
