"""Leaves restored straight into shards, by two processes that each read what their own devices hold."""

import shutil
import socket

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convert_child import CONTEXT, peak_memory
from dsv41_jax.checkpoint.convert import convert
from dsv41_jax.checkpoint.names import flatten, name_map
from dsv41_jax.checkpoint.orbax import OrbaxFolder
from dsv41_jax.checkpoint.released import ReleasedFolder, load_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import RELEASED
from large_model import write_large_model

EXPERTS = ("layers.ffn.experts", "mtp.layers.ffn.experts")
ROWS = ("embed.weight", "head.weight", "engram.l1.embed", "engram.l4.embed")


def axis_of(name):
    """Which axis of a leaf is split: experts, rows of large tables and of a dense weight. None: it is replicated."""
    if name.startswith(EXPERTS) or name.startswith("layers.attn.wq_b"):
        return 1
    return 0 if name.startswith(ROWS) else None


def expected_bytes(names, name, index):
    """What process `index` of two has to read of a tensor: its shards' rows, up to the edges of the scales' blocks."""
    place, spec = names.places[name], names.specs[name]
    axis, depth, rows = axis_of(".".join(place.path)), len(place.index), spec.shape[0]
    if axis is not None and axis < depth:
        half = names.leaves[place.path].stack[axis] // 2
        return spec.nbytes if place.index[axis] // half == index else 0
    if axis == depth:
        first, last = index * rows // 2, (index + 1) * rows // 2
        rows = min(rows, -(-last // 32) * 32) - first // 32 * 32
    return rows * (spec.nbytes // spec.shape[0])


def _load(index, port, folder, connection):
    """One process of two: loads, and sends what it holds and what it read."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def placement(name):
        axis = axis_of(name)
        return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "x") if axis is not None else PartitionSpec())

    read, rows = {}, OrbaxFolder.rows

    def counted(self, name, start, stop):
        found = rows(self, name, start, stop)
        read[name] = read.get(name, 0) + found.nbytes
        return found

    OrbaxFolder.rows = counted
    opened, before = OrbaxFolder.open(folder), peak_memory()
    params = dict(flatten(load_params(opened, RELEASED, placement=placement)))
    memory = peak_memory() - before
    held = {}
    for path, leaf in params.items():
        (shard,) = leaf.addressable_shards
        held[".".join(path)] = (shard.index, np.asarray(shard.data).tobytes() if leaf.nbytes < 1 << 20 else None)
    resident = sum(leaf.addressable_shards[0].data.nbytes for leaf in params.values())
    connection.send((held, read, memory, resident))
    connection.close()
    jax.distributed.shutdown()


def load_in_two_processes(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends, children = [], []
    for index in range(2):
        here, there = CONTEXT.Pipe()
        children.append(CONTEXT.Process(target=_load, args=(index, port, folder, there)))
        children[-1].start()
        there.close()
        ends.append(here)
    try:
        return [end.recv() for end in ends]
    finally:
        for child in children:
            child.join(60)
            child.kill()


def test_each_process_reads_what_it_holds(tiny_folder, tmp_path):
    convert(tiny_folder, tmp_path / "model", "orbax", write=lambda _: None)
    results = load_in_two_processes(tmp_path / "model")
    source = ReleasedFolder.open(tiny_folder)
    names = name_map(source.config)
    whole = {".".join(path): np.asarray(leaf) for path, leaf in flatten(load_params(source, RELEASED))}
    for index, (held, read, _, _) in enumerate(results):
        assert held.keys() == whole.keys()
        for name, (where, data) in held.items():
            axis = axis_of(name)
            if axis is not None:
                half = whole[name].shape[axis] // 2
                assert (where[axis].start or 0, where[axis].stop) == (index * half, (index + 1) * half), name
            assert data == whole[name][where].tobytes(), name
        for name in names.specs:
            assert read.get(name, 0) == expected_bytes(names, name, index), name
    assert sum(sum(read.values()) for _, read, _, _ in results) < 1.8 * sum(s.nbytes for s in names.specs.values())


@pytest.fixture(scope="module")
def large_released(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "large"
    write_large_model(golden, folder)
    return folder


@pytest.fixture
def roomy(tmp_path):
    """A folder for what is too large to be left behind."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_memory_is_that_of_the_shards(large_released, roomy):
    """A model of 2.6 GB: what each process holds, its largest shard once more (to give it its dtype), and a rest."""
    convert(large_released, roomy / "model", "orbax", write=lambda _: None)
    total = sum(spec.nbytes for spec in name_map(ModelConfig.from_json(large_released)).specs.values())
    for _, read, memory, resident in load_in_two_processes(roomy / "model"):
        print(f"{total / 1e6:.0f} MB: read {sum(read.values()) / 1e6:.0f}, holds {resident / 1e6:.0f}", end=", ")
        print(f"memory {memory / 1e6:.0f} MB")
        assert sum(read.values()) < 1.01 * resident < 0.6 * total
        assert memory < resident + (252 << 20) + (300 << 20) < 0.8 * total
