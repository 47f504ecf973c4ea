"""Spelled names of machines: what they are, which are refused, how their devices are connected."""

import os
import subprocess
import sys

import pytest

from dsv41_jax import topologies
from dsv41_jax.aot import GPU_TARGETS
from dsv41_jax.chips import CHIPS
from dsv41_jax.topologies import NoCompiler, parse


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts", "links"),
    [
        ("v5p:4x4x4", 64, 64, 16, 6),
        ("v6e:4x4", 16, 16, 4, 2),
        ("v5e:8x16", 128, 128, 32, 3),  # a ring along the axis of 16
        ("v7x:4x4x2", 32, 64, 8, 3),  # smaller than a cube: no rings
        ("v5e:2x2", 4, 4, 1, 2),
        ("h200:1x8", 8, 8, 1, 8),
        ("h100:2x8", 16, 16, 2, 8),
    ],
)
def test_counts(name, chips, devices, hosts, links):
    machine = parse(name)
    assert (machine.chips, machine.devices, machine.hosts, machine.links) == (chips, devices, hosts, links)
    assert machine.name == name and machine.chip is CHIPS[name.split(":")[0]]


def test_other_spellings_of_a_name():
    assert parse(" TPU7x:4x4x2 ") == parse("v7x:4x4x2")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5p", "chip:AxB"),
        ("v5p:4x4", "3 axes"),
        ("v6e:4x4x4", "2 axes"),
        ("v6e:3x4", "must be even"),
        ("v6e:32x32", "at most 256 chips"),
        ("v9:2x2", "no chip 'v9'"),
        ("h200:8", "hosts x GPUs"),
        ("h200:1x16", "at most 8 GPUs"),
        ("v5e:0x2", "at least one"),
    ],
)
def test_names_that_are_refused(name, says):
    with pytest.raises(ValueError, match=says) as refused:
        parse(name)
    assert "v5p:4x4x4" in str(refused.value) or "v6e:4x4" in str(refused.value)  # and how one is written


def test_hops():
    """Means over pairs of different chips, counted by hand."""
    assert parse("v5e:2x2").hops == pytest.approx((1 + 1 + 2) / 3)
    assert parse("v5p:4x4x4").hops == pytest.approx(3 * 1.0 * 64 / 63)  # rings of 4: 0, 1, 2, 1
    assert parse("h200:1x8").hops == 1


def test_every_chip_has_a_source_and_every_gpu_a_target():
    assert all(chip.sources for chip in CHIPS.values())
    assert all(name in GPU_TARGETS for name, chip in CHIPS.items() if chip.platform == "cuda")
    text = topologies.table()
    assert all(f"`{name}`" in text for name in topologies.EXAMPLES)
    assert all(source in text for chip in CHIPS.values() for source in chip.sources)


def test_devices_of_a_slice():
    machine = parse("v7x:2x2x1")
    devices = machine.jax_devices()
    assert len(devices) == machine.devices == 8
    nodes = [machine.node_of(device) for device in devices]
    assert len(set(nodes)) == machine.chips == 4 and all(nodes.count(node) == 2 for node in nodes)


def test_devices_of_gpus_or_how_to_get_them():
    machine = parse("h100:2x8")
    try:
        devices = machine.jax_devices()
    except NoCompiler as error:
        assert "pip install" in str(error) and "cuda12" in str(error)
        return
    assert [machine.node_of(device) for device in devices] == [0] * 8 + [1] * 8


def test_without_libtpu():
    script = (
        "import sys; sys.modules['libtpu'] = None\n"
        "from dsv41_jax.topologies import NoCompiler, parse\n"
        "try: parse('v5e:2x2').jax_devices()\n"
        "except NoCompiler as error: print(error)"
    )
    # A process that has used libtpu tells its children where it is.
    environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "libtpu" in said and 'pip install "jax[tpu]==' in said
