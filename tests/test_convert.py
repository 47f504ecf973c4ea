"""`launch/convert.py`: there and back with equal bytes; nothing is overwritten or left half written."""

import shutil

import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.checkpoint import convert as module
from dsv41_jax.checkpoint import new_folder
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from launch.convert import main
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
    assert main([str(orbax), str(tmp_path / "back"), "--to=released", "--shard_bytes=1000000"]) == 0
    shown = capsys.readouterr()
    assert "back: complete" in shown.out and "reading orbax: 100%" in shown.err and "writing back: 100%" in shown.err
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    assert tensors(tmp_path / "back") == tensors(released)
    for name in ("config.json", "token_map.npy"):
        assert (tmp_path / "back" / name).read_bytes() == (released / name).read_bytes()
    for folder in (orbax, tmp_path / "back"):
        assert not (folder / "README.md").exists()
        assert not [p.name for p in folder.parent.iterdir() if p.name.startswith(".")]
    models = [ds.load(folder, engram="host") for folder in (released, orbax)]
    assert models[0].config == models[1].config


def test_the_demo_there_and_back(tmp_path):
    demo = ds.load.__globals__["_find"]("demo", None)
    assert main([str(demo), str(tmp_path / "orbax"), "--to=orbax"]) == 0
    assert main([str(tmp_path / "orbax"), str(tmp_path / "back"), "--to=released"]) == 0
    assert tensors(tmp_path / "back") == tensors(demo)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (demo / name).read_bytes()


def refused(capsys, *words):
    def run(*argv):
        assert main([str(a) for a in argv]) == 1
        message = capsys.readouterr().err
        for word in words:
            assert word in message, message

    return run


def test_what_is_refused_before_anything_is_read(released, orbax, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "load_params", lambda *_, **__: pytest.fail("read the parameters"))
    refused(capsys, "no such folder")(tmp_path / "nowhere", tmp_path / "new", "--to=orbax")
    refused(capsys, "in the format 'released' already")(released, tmp_path / "new", "--to=released")
    refused(capsys, "in the format 'orbax' already")(orbax, tmp_path / "new", "--to=orbax")
    refused(capsys, "must not contain each other")(released, released / "new", "--to=orbax")
    refused(capsys, "must not contain each other")(released, released, "--to=orbax", "--force")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    refused(capsys, "already exists")(released, taken, "--to=orbax")
    refused(capsys, "something else than a model")(released, taken, "--to=orbax", "--force")
    (tmp_path / "empty").mkdir()
    refused(capsys, "config.json", "cannot be read")(tmp_path / "empty", tmp_path / "new", "--to=orbax")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    refused(capsys, "0.0 GB are free", "make room")(released, tmp_path / "a/b/new", "--to=orbax")
    assert {p.name for p in tmp_path.iterdir()} == {"taken", "empty"}
    with pytest.raises(ValueError, match="to='zip' is unknown"):
        module.convert(released, tmp_path / "new", "zip")
    with pytest.raises(SystemExit):
        main([str(released), str(tmp_path / "new"), "--to=zip"])


def test_force_replaces_a_model_only_when_the_new_one_is_complete(released, orbax, tmp_path, capsys, monkeypatch):
    target = tmp_path / "target"
    shutil.copytree(orbax, target)
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_released", lambda *_, **__: (_ for _ in ()).throw(CheckpointError("broke off")))
        refused(capsys, "broke off")(orbax, target, "--to=released", "--force")
    assert (target / "params").is_dir()
    assert main([str(orbax), str(target), "--to=released", "--force"]) == 0
    assert tensors(target) == tensors(released) and not (target / "params").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("to", ["orbax", "released"])
def test_nothing_is_left_of_a_conversion_that_breaks_off(released, orbax, to, tmp_path, capsys, monkeypatch):
    """At the last moment: all files are written, the name is not given yet."""
    monkeypatch.setattr(new_folder.Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("the disk went away")))
    refused(capsys, "the disk went away")(released if to == "orbax" else orbax, tmp_path / "new", f"--to={to}")
    assert not list(tmp_path.iterdir())
