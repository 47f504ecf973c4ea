"""Tiles of rows that are computed in a TPU kernel, and the pieces of a pool that they are merged into."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write.lanes import LANES, Columns

TILE = 128  # rows, at most: one to a lane where a tile is transposed
_CHUNK = 32  # rows of a loop step: a register of 8-bit rows
_UNROLL = 4
_VMEM_BYTES = 48 * 2**20


class Rows:
    """Rows [B, n, d] of all sequences as one list, padded to `steps` tiles of `tile` rows and to `width` lanes."""

    def __init__(self, raw: Array, norm: Array, cos: Array, sin: Array, eps: float):
        self.n, self.d, self.eps = math.prod(raw.shape[:2]), raw.shape[-1], eps
        self.tile = min(TILE, -(-self.n // _CHUNK) * _CHUNK)
        self.steps = -(-self.n // self.tile)
        self.width = -(-self.d // LANES) * LANES
        first = (self.d - 2 * cos.shape[-1]) // LANES * LANES  # columns before turn by the angle 0
        angles = [self._padded(part) for part in reference.full_angles(cos, sin, self.d - first)]
        weight = jnp.pad(norm.astype(jnp.float32), (0, self.width - self.d))[None]
        self.arrays = self._padded(raw), weight, *angles

    def _padded(self, x: Array) -> Array:
        """[B, n, width] -> [steps * tile, lanes]."""
        x = x.reshape(self.n, x.shape[-1])
        return jnp.pad(x, ((0, self.steps * self.tile - self.n), (0, -x.shape[1] % LANES)))

    def tiles(self, x: Array) -> Array:
        """A number for each row, [B, n] -> [steps, tile]; zero (or False) for padding."""
        return jnp.pad(x.reshape(-1), (0, self.steps * self.tile - self.n)).reshape(self.steps, self.tile)

    def output(self, width: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """An array with a row for each row."""
        return jax.ShapeDtypeStruct((self.steps * self.tile, width), dtype)

    def call(
        self,
        kernel: Callable,
        prefetched: Sequence[Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
        pools: Sequence[Array],
        scratch: Sequence[Any],
        name: str,
        interpret: bool,
    ) -> Sequence[Array]:
        """Run `kernel` on every tile in order.

        Its arguments: `prefetched` in scalar memory, the tile's raw rows, the norm's weight, cos, sin, the pools (where
        they come in, and again after `outputs` where they are to be changed), `scratch`, a semaphore for each pool.
        """

        def block(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
            whole = x.shape[0] == 1
            return pl.BlockSpec((1 if whole else self.tile, x.shape[1]), lambda i, *_: (0 if whole else i, 0))

        anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
        first = len(prefetched) + len(self.arrays)
        return pl.pallas_call(
            kernel,
            out_shape=[*outputs, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetched),
                grid=(self.steps,),
                in_specs=[*map(block, self.arrays), *anywhere],
                out_specs=[*map(block, outputs), *anywhere],
                scratch_shapes=[*scratch, *[pltpu.SemaphoreType.DMA] * len(pools)],
            ),
            input_output_aliases={first + i: len(outputs) + i for i in range(len(pools))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
            ),
            interpret=interpret,
            name=name,
        )(*prefetched, *self.arrays, *pools)

    def each_chunk(self, body: Callable[[Any], None]) -> None:
        """`body` for slices of the tile's rows."""

        def step(i, _):
            body(pl.ds(pl.multiple_of(i * _CHUNK, _CHUNK), _CHUNK))
            return 0

        jax.lax.fori_loop(0, self.tile // _CHUNK, step, 0)

    def each_row(self, body: Callable[[Array], None]) -> None:
        """`body` for the numbers of the tile's rows, in order."""

        def step(i, _):
            for k in range(_UNROLL):
                body(i * _UNROLL + k)
            return 0

        jax.lax.fori_loop(0, self.tile // _UNROLL, step, 0)


def load(ref: Any, rows: Any = slice(None)) -> Columns:
    """Rows of a reference as float32 columns."""
    return [ref[rows, i : i + LANES].astype(jnp.float32) for i in range(0, ref.shape[1], LANES)]


def store(ref: Any, rows: Any, columns: Columns) -> None:
    """The other way; the reference's dtype."""
    for i, column in enumerate(columns):
        ref[rows, i * LANES : (i + 1) * LANES] = column.astype(ref.dtype)


def first_use(piece: Array, kept: Array) -> Array:
    """Which use of its tile is the first of the same piece, for every use: int32 [steps, m] and bool -> [steps * m].

    m for a use that is not kept.
    """
    m = piece.shape[1]
    same = (piece[:, :, None] == piece[:, None, :]) & kept[:, None, :]
    first = jnp.min(jnp.where(same, jnp.arange(m), m), axis=-1)
    return jnp.where(kept, first, m).reshape(-1)


class Pieces:
    """Pieces of a pool in buffers: read, to be changed, written back.

    Args:
        first: of `first_use`, in scalar memory. step: the tile.
        at: reference to the piece of a use, numbered over all tiles.
        buffer: [m + 1, *piece]: buffer i belongs to the piece that use i of the tile is the first of; the last one
            to uses that are not kept.
    """

    def __init__(self, first: Any, step: Array, at: Callable[[Array], Any], buffer: Any, semaphore: Any):
        self.uses = buffer.shape[0] - 1
        self.begin = step * self.uses
        self.first, self.at, self.buffer, self.semaphore = first, at, buffer, semaphore

    def buffer_of(self, use: Array) -> Array:
        """The buffer of a use of the tile."""
        return self.first[self.begin + use]

    def _copy(self, use: Array, out: bool) -> Any:
        place, buffer = self.at(self.begin + use), self.buffer.at[use]
        return pltpu.make_async_copy(*((buffer, place) if out else (place, buffer)), self.semaphore)

    def _start(self, out: bool) -> None:
        def step(i, started):
            owner = self.buffer_of(i) == i
            pl.when(owner)(self._copy(i, out).start)
            return started + owner.astype(jnp.int32)

        self.started = jax.lax.fori_loop(0, self.uses, step, jnp.int32(0))

    def start_reading(self) -> None:
        """Begin to read all pieces."""
        self._start(out=False)

    def wait(self) -> None:
        """Until the copies begun last are done."""

        def step(_, unused):
            self._copy(0, False).wait()  # of this size, whichever it is
            return unused

        jax.lax.fori_loop(0, self.started, step, 0)

    def write(self) -> None:
        """Write all pieces back."""
        self._start(out=True)
        self.wait()
