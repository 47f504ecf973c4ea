"""A training step on meshes of eight devices equals the step on one."""

from __future__ import annotations

import pytest

from fake_devices import run_case


@pytest.mark.parametrize(
    ("mesh", "stage", "tables", "parts"),
    [("2x2x2", "backbone", "rounds", "1"), pytest.param("8x1x1", "joint", "gathered", "1", marks=pytest.mark.slow)],
)
def test_steps(mesh, stage, tables, parts):
    run_case("training_mesh", "same_steps", mesh, stage, tables, parts)


def test_tables_in_rounds():
    run_case("training_mesh", "table_in_rounds")
