"""Golden arrays of single modules, and the comparisons their tests use.

Each tolerance comes from two independent implementations of the released arithmetic: they agree to a relative rms of
1.2e-3 with at least 99.5 % of the bf16 outputs of a module equal, and to 1e-7 where everything is float32.
"""

import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parent / "golden"
BF16 = ml_dtypes.bfloat16
SUFFIXES = {
    "__bf16": BF16,
    "__e4m3": ml_dtypes.float8_e4m3fn,
    "__e8m0": ml_dtypes.float8_e8m0fnu,
    "__fp4x2": np.uint8,
}


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    """Every array of `golden/<name>.npz` in its real type, by its key without the type suffix."""
    arrays = {}
    with np.load(GOLDEN / f"{name}.npz") as file:
        for key in file.files:
            suffix = next((s for s in SUFFIXES if key.endswith(s)), None)
            array = file[key]
            arrays[key.removesuffix(suffix or "")] = array.view(SUFFIXES[suffix]) if suffix else array
    return arrays


def weights(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """The nested dict of arrays below `prefix`, split at the dots."""
    tree: dict[str, Any] = {}
    for key, array in arrays.items():
        if key.startswith(prefix):
            *path, leaf = key.removeprefix(prefix).split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = array
    return tree


def wide(x: Any) -> np.ndarray:
    """float32 values of any array."""
    return np.asarray(x).astype(np.float32)


def bits(x: Any) -> np.ndarray:
    """The stored bit patterns."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bits(got: Any, want: Any) -> None:
    """Same dtype, same shape, same bit patterns (so -0 is not +0)."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(bits(got), bits(want))


def assert_close(got: Any, want: Any) -> None:
    """Output of a module in bf16: relative rms at most 5e-3 and at least 97 % of the elements equal."""
    assert np.asarray(got).dtype == np.asarray(want).dtype == BF16
    got, want = wide(got), wide(want)
    assert got.shape == want.shape
    assert np.sqrt(np.mean((got - want) ** 2)) <= 5e-3 * np.sqrt(np.mean(want**2))
    assert np.mean(got == want) >= 0.97


def ulps(got: Any, want: Any) -> np.ndarray:
    """Distance of two bf16 arrays in steps of the format."""

    def ordered(x: Any) -> np.ndarray:
        pattern = bits(np.asarray(x).astype(BF16)).astype(np.int32)
        return np.where(pattern & 0x8000, -(pattern & 0x7FFF), pattern)

    return np.abs(ordered(got) - ordered(want))


def assert_within_one_ulp(got: Any, want: Any, equal: float = 0.0) -> None:
    """A bf16 result of one rounding: the float32 value before it may lie on the other side of a rounding border."""
    assert np.asarray(got).dtype == np.asarray(want).dtype == BF16
    distance = ulps(got, want)
    assert distance.max() <= 1
    assert np.mean(distance == 0) >= equal
