"""Loss and gradients of tiny model A, whole prompts and packed samples, against the recorded reference (float32).

Small elements of a gradient carry the rounding of large ones, so elements are compared on the scale of their tensor.
"""

import jax
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import next_token_loss
from tiny_golden import recording

LOSS_ATOL = 5e-6
NORM_RTOL = 2e-4  # of a tensor, and of a recorded piece of one
ELEMENT_RTOL = 2e-3  # of the tensor's root mean square


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    """Tiny model A in float32; its loss programs compile fast."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("loss", "loss_and_grads"):
            body = getattr(next_token_loss, name).__wrapped__
            program = jax.jit(body, static_argnames=("config", "numerics"))
            patch.setattr(next_token_loss, name, program)
        yield tiny("float32")


def assert_piece(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Relative norm of the difference; an all-zero piece is exactly zero."""
    norm = np.linalg.norm(expected)
    difference = np.linalg.norm(actual - expected)
    assert difference <= NORM_RTOL * norm, f"{name}: |difference| / |recorded| = {difference / max(norm, 1e-30):.1e}"


def assert_recorded(grads: dict[str, np.ndarray], name: str, prefix: str) -> None:
    """Everything recorded of one tensor's gradient, whole or in pieces."""
    g, actual, key = recording("grads"), grads[name], prefix + name
    if key in g:
        expected = g[key]
        assert_piece(actual, expected, name)
        scale = np.linalg.norm(expected) / np.sqrt(expected.size)
        assert np.abs(actual - expected).max() <= ELEMENT_RTOL * scale, name
        return
    norm = g[key + ".norm"].item()
    assert abs(np.linalg.norm(actual) - norm) <= NORM_RTOL * norm, name
    if key + ".samples" in g:
        assert_piece(actual.reshape(-1)[g[f"positions.{actual.size}"]], g[key + ".samples"], name)
    if key + ".first" in g:
        first = g[key + ".first"]
        assert_piece(actual.reshape(-1)[: first.size], first, name)
    if key + ".rows" in g:
        rows = g[key + ".rows"]
        assert_piece(actual[rows], g[key + ".row_grads"], name)
        assert not np.delete(actual, rows, axis=0).any(), f"{name}: rows of absent tokens"


def recorded_names(prefix: str) -> set[str]:
    """Tensors with a recorded gradient."""
    pieces = (".norm", ".samples", ".first", ".rows", ".row_grads")
    keys = (key.removeprefix(prefix) for key in recording("grads") if key.startswith(prefix))
    return {next((key.removesuffix(p) for p in pieces if key.endswith(p)), key) for key in keys}


def is_zero(name: str) -> bool:
    g = recording("grads")
    return f"grad.{name}.norm" in g and g[f"grad.{name}.norm"].item() == 0


def test_every_gradient(model):
    """With segment ids of one sample: the packed case below uses the same program."""
    g = recording("grads")
    ids = g["input_ids"][None]
    loss, grads = model.loss_and_grads(ids, np.zeros_like(ids))
    assert abs(float(loss) - g["loss"].item()) <= LOSS_ATOL
    grads = {name: np.asarray(value) for name, value in grads.items()}
    names = recorded_names("grad.")
    # Index sources and biases choose, which has no gradient; drafts and vision are no part of this loss.
    zero = {name for name in names if is_zero(name)}
    assert len(zero) == 34
    assert names - zero <= set(grads)
    for name in names - zero:
        assert_recorded(grads, name, "grad.")
    nonzero = {name for name, value in grads.items() if value.any()}
    assert nonzero == names - zero
    total = np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in grads.values()))
    np.testing.assert_allclose(total, g["global_norm"].item(), rtol=NORM_RTOL)


def test_packed_samples(model):
    g = recording("grads")
    segments = np.repeat(np.arange(2, dtype=np.int32), g["packed.lens"])[None]
    loss, grads = model.loss_and_grads(g["packed.input_ids"][None], segments)
    assert abs(float(loss) - g["packed.loss"].item()) <= LOSS_ATOL
    grads = {name: np.asarray(value) for name, value in grads.items()}
    names = recorded_names("packed.grad.")
    assert len(names) == 2
    for name in names:
        assert_recorded(grads, name, "packed.grad.")


def test_loss_without_segment_ids(model):
    g = recording("grads")
    assert abs(float(model.loss(g["input_ids"][None])) - g["loss"].item()) <= LOSS_ATOL
