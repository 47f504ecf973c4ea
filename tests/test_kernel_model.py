"""Tiny model A computed by the TPU kernels, interpreted: the golden recordings hold for it too."""

import pytest

import dsv41_jax as ds
from released_golden import check_every_block, check_short


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("released", "interpret")


def test_every_block_on_recorded_input(model):
    check_every_block(model)


def test_short(model):
    check_short(model)
