"""launch/device_check.py and the workloads it runs."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax import kernel_workloads
from dsv41_jax.kernel_workloads import Workload

_PATH = Path(__file__).parent.parent / "launch" / "device_check.py"


@pytest.fixture(scope="module")
def device_check():
    spec = importlib.util.spec_from_file_location("device_check", _PATH)
    module = sys.modules["device_check"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def work(name: str, wrong: float = 0.0, fails: bool = False, **options) -> Workload:
    """x + 1; a kernel that is off by `wrong`, or fails."""

    def call(a, implementation: str):
        if fails and implementation != "reference":
            raise ValueError("no such kernel")
        return (a["x"] + 1 + (0.0 if implementation == "reference" else wrong),)

    return Workload(name, "mhc", lambda key: {"x": jax.random.normal(key, (64,))}, call, 512, 0, **options)


def test_refuses_a_machine_without_accelerator(device_check, capsys):
    with pytest.raises(SystemExit):
        device_check.main([])
    assert "--implementation=interpret" in capsys.readouterr().err


def test_table_and_exit_status(device_check, capsys, monkeypatch, tmp_path):
    works = [
        work("right"),
        work("near", 1e-3, tolerance=(0.0, 1e-2)),
        work("wrong", 1e-3),
        work("fails", fails=True),
        work("large", large=True),
    ]
    monkeypatch.setattr(kernel_workloads, "workloads", lambda scale, operations: works)
    file = tmp_path / "rows.json"
    status = device_check.main(["--implementation", "interpret", "--quick", "--seed", "1", "--json", str(file)])
    assert status == 1
    out = capsys.readouterr().out
    assert "2 of 4 workloads right" in out and "WRONG 0.001" in out and "FAILED  ValueError: no such kernel" in out
    assert [row["within"] for row in json.loads(file.read_text())["rows"]] == [True, True, False, False]


def test_times_of_updates_in_place(device_check):
    updating = work("updating", updates={"x": 0})
    line = device_check.Roofline(1e9, 1e9, 1e-5)
    row = device_check.measure(updating, jax.random.key(0), "gpu", line)
    assert row.within and row.seconds > 0 and row.fraction == line.bound(updating) / row.seconds


def test_comparison_tells_floats_from_integers():
    compare = work("any", tolerance=(0.0, 0.5), flips=1).compare
    x, n = jnp.array([1.0, 2.0]), jnp.array([3, 4])
    assert str(compare((x, n), (x, n))) == "equal"
    assert compare((x + 0.4, n.at[0].set(9)), (x, n)).within
    assert not compare((x + 0.6, n), (x, n)).within
    assert not compare((x, n + 1), (x, n)).within
    assert not compare((x.at[0].set(jnp.nan), n), (x, n)).within


def test_every_released_workload_can_be_described():
    names = set()
    for item in kernel_workloads.workloads("released"):
        names.add(item.name)
        arguments = jax.eval_shape(item.make, jax.random.key(0))
        jax.eval_shape(lambda a, item=item: item.call(item.part(a) if item.part else a, "reference"), arguments)
        assert item.bytes > 0 and all(name in arguments for name in item.updates)
    assert len(names) == len(kernel_workloads.workloads("released"))
    with pytest.raises(ValueError, match="unknown"):
        kernel_workloads.workloads("released", ["softmax"])
