"""Sharding invariance: models on meshes of two to eight devices give what they give on one."""

from __future__ import annotations

import pytest

from fake_devices import run_case


@pytest.mark.parametrize(("mesh", "mode"), [("2x1x1", "exact"), ("1x2x2", "ced"), ("2x2x2", "exact"), ("8x1x1", "ced")])
def test_float32(mesh, mode):
    """Context splits blocks, rows do not divide, expert shares are one or several."""
    run_case("mesh_cases", "float32", mesh, mode)


def test_released():
    run_case("mesh_cases", "released", "2x2x2")


@pytest.mark.parametrize("mesh", ["1x2x2", "8x1x1"])
def test_greedy_text_of_the_demo(mesh):
    run_case("mesh_cases", "greedy_text", mesh)
