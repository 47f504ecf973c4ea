"""The three numerics of the forward pass, and the one way to round between modules.

`released`  bf16 activations, FP8/FP4 activation and cache quantisation: what the released stack computes.
`noquant`   bf16 activations, activations and caches unquantised, weights as stored.
`float32`   everything in float32, weights dequantised. It checks the architecture without rounding noise.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.parallel import SINGLE, Parallel
from pallas_kernels.implementation import KernelError

ACTIVATION_POINTS = ("linear_inputs", "window_kv", "main_kv", "index")
WEIGHT_POINTS = ("dense_weights", "expert_weights", "tables")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Static description of one numerics.

    Attributes:
        name: public name.
        dtype: dtype of activations between modules (jnp.bfloat16 or jnp.float32).
        quantize_activations: whether matmul inputs, window KV, main KV and index queries/keys are quantised.
        quantize_weights: whether float weights are quantised where they are used, with straight-through gradients
            (training only).
        unquantized: points of `ACTIVATION_POINTS` and `WEIGHT_POINTS` that stay as they are (training only:
            caches store a numerics' own formats).
        implementation: who computes it: "reference" or a kernel ("tpu", "gpu", "interpret"), see
            `pallas_kernels.implementation`. Kernels know `released` only.
        parallel: the devices among which it is spread. No number depends on it, but the order in which the outputs of
            experts are summed.
    """

    name: str
    dtype: jnp.dtype
    quantize_activations: bool
    quantize_weights: bool = False
    unquantized: frozenset[str] = frozenset()
    implementation: str = "reference"
    parallel: Parallel = SINGLE

    @property
    def kernels(self) -> bool:
        """Whether kernels compute it."""
        return self.implementation != "reference"

    def quantizes(self, point: str) -> bool:
        """Whether values are quantised at a point of `ACTIVATION_POINTS` or `WEIGHT_POINTS`."""
        on = self.quantize_weights if point in WEIGHT_POINTS else self.quantize_activations
        return on and point not in self.unquantized

    def without(self, points: Iterable[str]) -> "Numerics":
        """These numerics with some points left unquantised; ValueError for one that does not exist."""
        unknown = set(points) - {*ACTIVATION_POINTS, *WEIGHT_POINTS}
        if unknown:
            known = ", ".join((*ACTIVATION_POINTS, *WEIGHT_POINTS))
            raise ValueError(f"no quantisation point is called {', '.join(sorted(unknown))}; choose among {known}")
        return dataclasses.replace(self, unquantized=self.unquantized | frozenset(points))

    def computed_by(self, implementation: str) -> "Numerics":
        """These numerics, computed by `implementation` (one that `pallas_kernels.implementation.resolve` returned).

        Raises:
            KernelError: there are no kernels for these numerics.
        """
        if implementation != "reference" and self.name != RELEASED.name:
            raise KernelError(
                f"numerics={self.name!r} has no kernels (implementation={implementation!r}): they compute "
                f'{RELEASED.name!r} only; use implementation="reference" or "auto"'
            )
        return dataclasses.replace(self, implementation=implementation)

    def spread(self, parallel: Parallel) -> "Numerics":
        """These numerics, spread over devices."""
        return dataclasses.replace(self, parallel=parallel)

    def round(self, x: Array) -> Array:
        """Round float32 to the activation dtype, once.

        `reduce_precision` keeps the rounding when XLA fuses a narrowing and a widening conversion.
        """
        if self.dtype == jnp.float32:
            return x.astype(jnp.float32)
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(self.dtype)

    def round_f32(self, x: Array) -> Array:
        """As `round`, but the result stays in float32: for values that are used in float32 right away."""
        if self.dtype == jnp.float32:
            return x
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


RELEASED = Numerics("released", jnp.dtype(jnp.bfloat16), True)
NOQUANT = Numerics("noquant", jnp.dtype(jnp.bfloat16), False)
FLOAT32 = Numerics("float32", jnp.dtype(jnp.float32), False)
# Training on float32 master weights: the release's quantisation points applied to activations and weights, computed in
# float32 or in bf16.
QUANTIZED_TRAINING = Numerics("quantized_training", jnp.dtype(jnp.float32), True, True)
QUANTIZED_TRAINING_BF16 = Numerics("quantized_training_bf16", jnp.dtype(jnp.bfloat16), True, True)

_BY_NAME = {n.name: n for n in (RELEASED, NOQUANT, FLOAT32)}


def named(name: str) -> Numerics:
    """Return the numerics called `name`; ValueError lists the names that exist."""
    if name not in _BY_NAME:
        raise ValueError(f"numerics={name!r} is unknown; choose one of {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def _widen_operands() -> bool:
    """Whether the program being traced is for a CPU: the devices of the mesh in the context, else the default ones."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.default_backend() == "cpu" if device is None else device.platform == "cpu"


def einsum_f32(spec: str, a: Array, b: Array) -> Array:
    """Einsum with exact products and float32 accumulation; the result is float32 and unrounded.

    bf16 products are exact in float32, so widening the operands first changes nothing, and CPUs multiply float32
    faster. The order of a row's sum may depend on how many rows there are: steps have few, fixed numbers of rows.
    """
    if _widen_operands() or a.dtype == jnp.float32 or b.dtype == jnp.float32:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def project_rows(x: Array, matrix: Array) -> Array:
    """x [..., k] times matrix [n, k] transposed -> float32 [..., n], unrounded.

    A single row is computed twice: a matrix-vector product sums in another order than a matrix product, and one token
    of one sequence must give what it gives in a small batch.
    """
    lead = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1:
        return einsum_f32("tk,nk->tn", jnp.concatenate([rows, rows]), matrix)[:1].reshape(*lead, -1)
    return einsum_f32("tk,nk->tn", rows, matrix).reshape(*lead, -1)


FEW_TOKENS = 8  # of a verify block


def row_sum(x: Array) -> Array:
    """Sum of float32 x over the last axis: [B, t, ..., n] -> [B, t, ...].

    On a CPU, blocks of few tokens use a matrix product with ones: XLA's own reduction changes its order with the number
    of rows, and a verify block must give the bits that single tokens give.
    """
    few = x.ndim > 2 and x.shape[0] * x.shape[1] <= FEW_TOKENS
    if not (few and _widen_operands()):
        return jnp.sum(x, axis=-1)
    return project_rows(x, jnp.ones((2, x.shape[-1]), jnp.float32))[..., 0]
