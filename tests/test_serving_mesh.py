"""The engine on meshes: rows of several devices are read and written side by side, with the texts of one device."""

from __future__ import annotations

import pytest

from fake_devices import run_case


def test_texts_on_a_mesh():
    """Two rows on each of four devices."""
    run_case("serving_cases", "same_texts", "2x1x2:device")


@pytest.mark.slow
def test_texts_on_more_meshes():
    """`context` splits blocks; tables in host memory; one row on each device."""
    run_case("serving_cases", "same_texts", "1x2x2:device", "2x1x2:host", "8x1x1:mmap")
