"""Sharding invariance: models on meshes of two to eight devices give what they give on one."""

from __future__ import annotations

import pytest

from fake_devices import run_case


@pytest.mark.parametrize(
    ("mode", "meshes"),
    [
        ("exact", ["2x1x1", "2x2x2"]),
        ("ced", ["1x2x2"]),
        pytest.param("ced", ["8x1x1"], marks=pytest.mark.slow),
    ],
)
def test_float32(mode, meshes):
    """`context` splits blocks, rows do not divide, expert shares are one or several."""
    run_case("mesh_cases", "same_logits", "float32", mode, *meshes)


@pytest.mark.slow
def test_released():
    run_case("mesh_cases", "same_logits", "released", "exact", "2x1x2", "2x2x2")


@pytest.mark.parametrize(
    ("mesh", "drafts"),
    [("1x2x2", "plain"), pytest.param("8x1x1", "drafts", marks=pytest.mark.slow)],
)
def test_greedy_text_of_the_demo(mesh, drafts):
    run_case("mesh_cases", "greedy_text", mesh, drafts)


def test_what_does_not_belong_together_is_refused():
    run_case("mesh_cases", "misuse")


@pytest.mark.slow
def test_experts_by_all_to_all():
    run_case("mesh_cases", "many_tokens", "2x2x2")


@pytest.mark.slow
def test_loss_and_gradients():
    run_case("mesh_cases", "loss_and_gradients", "2x1x2")
