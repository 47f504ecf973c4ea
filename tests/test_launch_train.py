"""`launch/train.py`: what its flags make of a config, and how it ends on bad ones (runs: `test_training_run`)."""

from __future__ import annotations

import pytest

from launch import train

CONFIG = "configs/continue_pretraining.py"


def values(*changes: str) -> dict:
    return train.values_of(train.parse([f"--config={CONFIG}", *changes]))


def test_changes_are_read_as_what_they_are():
    found = values("--set", "steps=5", "optimizer.peak_rate=1e-4", "data.sources=[{'path': 'a'}]", "mesh=2x1x1")
    assert found["steps"] == 5 and found["optimizer"]["peak_rate"] == 1e-4 and found["mesh"] == "2x1x1"
    assert found["data"]["sources"] == [{"path": "a"}] and found["data"]["batch"] == 8
    assert values("--set", "export=None")["export"] is None


def test_a_second_set_adds_to_the_first():
    found = values("--set", "steps=5", "--set", "data.batch=4")
    assert found["steps"] == 5 and found["data"]["batch"] == 4


def test_all_settings_are_listed(capsys):
    train.main([f"--config={CONFIG}", "--list", "--set", "objective.anchors=7"])
    assert "objective.anchors=7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config=nowhere.py"], "nowhere.py: no such file"),
        (["--config=README.md"], "cannot be run"),
        (["--config=launch/train.py"], "no get_config"),
        ([f"--config={CONFIG}", "--set", "steps"], "NAME=VALUE is needed"),
        ([f"--config={CONFIG}", "--set", "steps.more=1"], "steps is no section"),
        ([f"--config={CONFIG}", "--set", "stepz=1"], "unknown settings .'stepz'"),
        ([f"--config={CONFIG}", "--set", "data.lenght=1"], "data: unknown settings"),
        ([f"--config={CONFIG}", "--set", "steps=many"], "steps='many': int is needed"),
    ],
)
def test_bad_settings_end_it_with_a_message(flags, message):
    with pytest.raises(SystemExit, match=message):
        train.main(flags)
