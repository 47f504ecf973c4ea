"""Layers of tiny model A computed by the TPU kernels, interpreted, on the recorded values that they read.

In blocks of 64 tokens, as a prefill has them; `test_kernel_model` runs all layers in blocks that decoding has.
"""

import pytest

from released_golden import check_blocks


def test_a_candidate_source_and_the_layer_that_searches_its_pool(tiny):
    check_blocks(tiny("released", "interpret"), (6, 8))


@pytest.mark.slow
def test_every_block_on_recorded_input(tiny):
    check_blocks(tiny("released", "interpret"))
