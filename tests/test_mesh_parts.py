"""Exchanges between devices: experts at any load, padded experts, kernels, tables split over devices."""

from __future__ import annotations

import pytest

from fake_devices import run_case


@pytest.mark.parametrize("case", ["imbalance", "padding", "kernels", "engram_rows", "made_in_shards"])
def test_as_on_one_device(case):
    run_case("mesh_parts", case)
