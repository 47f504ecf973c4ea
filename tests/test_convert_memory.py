"""Host memory of a conversion does not depend on the size of the model, a leaf, or a tensor."""

import shutil

import numpy as np
import pytest

from convert_child import run
from dsv41_jax.checkpoint.checksum import crc32, read_checksums
from dsv41_jax.checkpoint.names import name_map
from dsv41_jax.checkpoint.orbax import OrbaxFolder
from dsv41_jax.checkpoint.orbax_layout import stored_leaves
from dsv41_jax.config import ModelConfig
from large_model import SPARSE, write_large_model

BOUND = 256 << 20  # a few pieces of 8 MiB, what TensorStore holds of them while it writes, modules, tables of names


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
def test_memory_is_bounded_both_ways(large_released, roomy):
    names = name_map(ModelConfig.from_json(large_released))
    leaf = max(int(np.prod(shape)) * dtype.itemsize for shape, dtype in stored_leaves(names).values())
    tensor = max(spec.nbytes for spec in names.specs.values())
    total = sum(spec.nbytes for spec in names.specs.values())
    assert leaf > 1.8 * BOUND and tensor > 1.2 * BOUND and total > 8 * BOUND
    there = run([large_released, roomy / "orbax", "--to=orbax", "--verify"], roomy, commit=False)
    assert there.code == 0, there.shown
    back = run([roomy / "orbax", roomy / "back", "--to=released", "--verify"], roomy, commit=False)
    assert back.code == 0, back.shown
    print(f"{total / 1e6:.0f} MB, largest leaf {leaf / 1e6:.0f}, tensor {tensor / 1e6:.0f};", end=" ")
    print(f"memory there {there.memory / 1e6:.0f} MB, back {back.memory / 1e6:.0f} MB")
    assert max(there.memory, back.memory) < BOUND
    opened = OrbaxFolder.open(roomy / "orbax")
    for name, at in SPARSE.items():
        row, column = divmod(at, names.specs[name].nbytes // names.specs[name].shape[0])
        assert opened.rows(name, row, row + 1).view(np.uint8).reshape(-1)[column] == 0x35
        assert int(opened.rows(name, row, row + 1).view(np.uint8).astype(int).sum()) == 0x35
    assert read_checksums(roomy / "back").tensors == read_checksums(roomy / "orbax").tensors
    norm = np.zeros(names.specs["norm.weight"].nbytes, np.uint8)
    assert read_checksums(roomy / "orbax").tensors["norm.weight"] == crc32(norm)
