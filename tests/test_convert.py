"""`launch/convert.py`: there and back with equal bytes and checksums; nothing is overwritten; damage is found.

`test_convert_resume.py` kills it and runs it again, `test_convert_processes.py` shares the work.
"""

import shutil

import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.checkpoint import conversion
from dsv41_jax.checkpoint.checksum import crc32, read_checksums
from dsv41_jax.checkpoint.convert import convert
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from dsv41_jax.model_folder import find_folder
from launch.convert import main
from launch.verify import main as verify_main
from oracle_weights import read_safetensors


@pytest.fixture(scope="module")
def released(tiny_folder, golden, tmp_path_factory):
    """Tiny model A with a token map in its folder."""
    path = tmp_path_factory.mktemp("convert") / "tiny"
    shutil.copytree(tiny_folder, path)
    np.save(path / "token_map.npy", np.load(golden / "tinyA_token_map.npz")["token_map"])
    (path / "README.md").write_text("stays behind")
    return path


@pytest.fixture(scope="module")
def orbax(released):
    path = released.with_name("orbax")
    assert main([str(released), str(path), "--to=orbax"]) == 0
    return path


def tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: (v.dtype, v.shape, v.tobytes()) for name, v in read_safetensors(file).items()}
    return found


def test_there_and_back(released, orbax, tmp_path, capsys):
    assert main([str(orbax), str(tmp_path / "back"), "--to=released", "--shard_bytes=1000000", "--verify"]) == 0
    shown = capsys.readouterr()
    assert "back: complete" in shown.out and "converting orbax: 100%" in shown.err
    assert "verified: 1016 tensors" in shown.out and "verifying .back.partial: 100%" in shown.err
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    assert tensors(tmp_path / "back") == tensors(released)
    for name in ("config.json", "token_map.npy"):
        assert (tmp_path / "back" / name).read_bytes() == (released / name).read_bytes()
    for folder in (orbax, tmp_path / "back"):
        assert not (folder / "README.md").exists()
        assert not [p.name for p in folder.parent.iterdir() if p.name.startswith(".")]
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
    models = [ds.load(folder, engram="host") for folder in (released, orbax)]
    assert models[0].config == models[1].config


def test_the_demo_there_and_back(tmp_path):
    demo = find_folder("demo", None)
    assert main([str(demo), str(tmp_path / "orbax"), "--to=orbax"]) == 0
    assert main([str(tmp_path / "orbax"), str(tmp_path / "back"), "--to=released"]) == 0
    assert tensors(tmp_path / "back") == tensors(demo)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (demo / name).read_bytes()


def test_the_checksums_are_those_of_the_tensors(released, orbax):
    source = ReleasedFolder.open(released)
    assert read_checksums(orbax).tensors == {name: crc32(source.read(name)) for name in source.entries}


def test_large_tensors_pass_in_pieces(released, small_pieces, tmp_path, capsys):
    """With the same result."""
    assert main([str(released), str(tmp_path / "orbax"), "--to=orbax", "--verify"]) == 0
    assert len(list((tmp_path / "orbax/params/layers.attn.wq_b.weight").iterdir())) > 20
    assert main([str(tmp_path / "orbax"), str(tmp_path / "back"), "--to=released", "--verify"]) == 0
    assert tensors(tmp_path / "back") == tensors(released)
    source = ReleasedFolder.open(released)
    expected = {name: crc32(source.read(name)) for name in source.entries}
    assert read_checksums(tmp_path / "orbax").tensors == read_checksums(tmp_path / "back").tensors == expected


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(conversion.cut, "PIECE_BYTES", 4096)


def refused(capsys, *words):
    def run(*argv):
        assert main([str(a) for a in argv]) == 1
        message = capsys.readouterr().err
        for word in words:
            assert word in message, message

    return run


def test_what_is_refused_before_anything_is_written(released, orbax, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(conversion, "transfer", lambda *_: pytest.fail("began"))
    refused(capsys, "no such folder")(tmp_path / "nowhere", tmp_path / "new", "--to=orbax")
    refused(capsys, "in the format 'released' already")(released, tmp_path / "new", "--to=released")
    refused(capsys, "in the format 'orbax' already")(orbax, tmp_path / "new", "--to=orbax")
    refused(capsys, "must not contain each other")(released, released / "new", "--to=orbax")
    refused(capsys, "must not contain each other")(released, released, "--to=orbax", "--force")
    refused(capsys, "is for hub ids")(released, tmp_path / "new", "--to=orbax", "--revision=main")
    refused(capsys, "nothing to finish")(released, tmp_path / "new", "--to=orbax", "--finish")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    refused(capsys, "already exists")(released, taken, "--to=orbax")
    refused(capsys, "something else than a model")(released, taken, "--to=orbax", "--force")
    (tmp_path / "empty").mkdir()
    refused(capsys, "config.json", "cannot be read")(tmp_path / "empty", tmp_path / "new", "--to=orbax")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    refused(capsys, "0.0 GB are free", "make room")(released, tmp_path / "a/b/new", "--to=orbax")
    assert {p.name for p in tmp_path.iterdir()} == {"taken", "empty"}
    with pytest.raises(ValueError, match="to='zip' is unknown"):
        convert(released, tmp_path / "new", "zip")
    several = ["--processes=2", "--process=1"]
    refused(capsys, "for a single process")(released, tmp_path / "new", "--to=orbax", "--force", *several)
    refused(capsys, "finish is for process 0")(released, tmp_path / "new", "--to=orbax", "--finish", *several)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--to=zip"], "invalid choice"),
        (["--to=orbax", "--shard_bytes=0"], "at least 1"),
        (["--to=orbax", "--process=2", "--processes=2"], "count from 0"),
        (["--to=orbax", "--process=-1", "--processes=2"], "count from 0"),
        (["--to=orbax", "--process=1"], "--processes is needed"),
        (["--to=orbax", "--processes=2"], "--process is needed"),
        (["--to=orbax", "--wait=0"], "positive"),
        (["--to=orbax", "--wait=nan"], "positive"),
    ],
)
def test_flags_are_refused_before_anything_else(flags, word, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dsv41_jax.checkpoint.convert.convert", lambda *_, **__: pytest.fail("began"))
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path / "new"), *flags])
    assert word in capsys.readouterr().err


def test_a_hub_id_is_fetched_as_load_does(released, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *args, **named: asked.append((args, named)) or str(released)
    )
    assert main(["someone/tiny-model", str(tmp_path / "new"), "--to=orbax", "--revision=v1"]) == 0
    assert [(args, named["revision"]) for args, named in asked] == [(("someone/tiny-model",), "v1")]
    assert read_checksums(tmp_path / "new").tensors.keys() == ReleasedFolder.open(released).entries.keys()
    refused(capsys, "already exists")("someone/tiny-model", released, "--to=orbax")
    assert len(asked) == 1  # nothing is fetched for a target that is occupied


def test_force_replaces_a_model_only_when_the_new_one_is_complete(released, orbax, tmp_path, capsys, monkeypatch):
    target = tmp_path / "target"
    shutil.copytree(orbax, target)
    refused(capsys, "already exists")(orbax, target, "--to=released")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "copy_text_files", lambda *_: (_ for _ in ()).throw(CheckpointError("broke off")))
        refused(capsys, "broke off")(orbax, target, "--to=released", "--force")
    assert (target / "params").is_dir()
    assert main([str(orbax), str(target), "--to=released", "--force"]) == 0
    assert "going on" in capsys.readouterr().out
    assert tensors(target) == tensors(released) and not (target / "params").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_complete_conversion_is_not_done_again(released, tmp_path, capsys, monkeypatch):
    source = shutil.copytree(released, tmp_path / "source")
    argv = [str(source), str(tmp_path / "new"), "--to=orbax"]
    assert main(argv) == 0
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "transfer", lambda *_: pytest.fail("began"))
        assert main(argv) == 0
        assert "complete already" in capsys.readouterr().out
        assert main([*argv, "--verify"]) == 0
        (source / "model.safetensors").touch()  # may hold other values now
        refused(capsys, "already exists")(*argv)
        refused(capsys, "in the format 'released' already")(source, tmp_path / "new", "--to=released")
    assert {p.name for p in tmp_path.iterdir()} == {"source", "new"}


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_changed_bit_is_found(released, orbax, tmp_path, capsys):
    """By verify in either format, by --verify, and when the damaged folder is converted."""
    folder = shutil.copytree(orbax, tmp_path / "orbax")
    assert verify_main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "checksums: 1016 tensors compared, all equal" in shown and "verdict: ok" in shown
    flip(folder / "params/layers.ffn.experts.w1.weight/3.1.0.0", 77)
    assert verify_main([str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "1 problem" in shown and "problem: layers.3.ffn.experts.1.w1.weight in" in shown
    refused(capsys, "layers.3.ffn.experts.1.w1.weight", "source is damaged")(folder, tmp_path / "back", "--to=released")
    flip(folder / "params/layers.ffn.experts.w1.weight/3.1.0.0", 77)  # mended
    assert main([str(folder), str(tmp_path / "back"), "--to=released"]) == 0
    assert tensors(tmp_path / "back") == tensors(released)
    flip(tmp_path / "back/model.safetensors", -1000)
    assert verify_main([str(tmp_path / "back"), "--layers=0"]) == 1
    assert "its bytes have the checksum" in capsys.readouterr().out
    refused(capsys, "its bytes have the checksum")(folder, tmp_path / "back", "--to=released", "--verify")
    (tmp_path / "back/checksums.json").write_text("{}")
    assert verify_main([str(tmp_path / "back"), "--layers=0"]) == 1
    assert "checksums.json: damaged" in capsys.readouterr().out
    (tmp_path / "back/checksums.json").unlink()
    assert verify_main([str(tmp_path / "back"), "--layers=0"]) == 0
    assert "checksums: none recorded" in capsys.readouterr().out


def test_a_copy_that_does_not_read_back_is_not_completed(released, tmp_path, capsys, monkeypatch):
    """And what was wrong with it is written anew by the next run."""
    argv = [str(released), str(tmp_path / "new"), "--to=orbax", "--verify"]
    chunk = tmp_path / ".new.partial/params/layers.attn.wq_a.weight/1.0.0"
    copy = conversion.copy_text_files
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "copy_text_files", lambda *args: (flip(chunk, 5), copy(*args)))
        refused(capsys, "layers.1.attn.wq_a.weight", "written anew")(*argv)
    assert not (tmp_path / "new").exists()
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "(1015 of 1016 pieces) are done already" in shown and "verified" in shown
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
