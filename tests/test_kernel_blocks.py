"""Layers of tiny model A computed by the TPU kernels, interpreted, on the recorded values that they read."""

from released_golden import check_every_block


def test_every_block_on_recorded_input(tiny):
    check_every_block(tiny("released", "interpret"))
