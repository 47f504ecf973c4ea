"""Tiles of rows that are computed in a TPU kernel, and the pieces of a pool that they are merged into."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
        self.still = self.d - 2 * cos.shape[-1]  # channels that do not turn
        weight = jnp.pad(norm.astype(jnp.float32), (0, self.width - self.d))[None]
        self.arrays = self._padded(raw), weight, self._padded(cos), self._padded(sin)

    def _padded(self, x: Array) -> Array:
        """[B, n, width] -> [steps * tile, lanes]."""
        x = x.reshape(self.n, x.shape[-1])
        return jnp.pad(x, ((0, self.steps * self.tile - self.n), (0, -x.shape[1] % LANES)))

    def numbers(self, x: Array, keep: Array | None = None) -> Array:
        """A number for each row, [B, n] -> int32 [steps * tile]; -1 for padding and rows that are not kept."""
        x = x if keep is None else jnp.where(keep, x, -1)
        return jnp.pad(x.reshape(-1), (0, self.steps * self.tile - self.n), constant_values=-1).astype(jnp.int32)

    def output(self, width: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """An array with a row for each row."""
        return jax.ShapeDtypeStruct((self.steps * self.tile, width), dtype)

    def call(
        self,
        kernel: Callable,
        prefetched: Sequence[Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
        pools: Sequence[Array],
        buffers: Sequence[tuple[int, tuple[int, ...]]],
        scratch: Sequence[Any],
        name: str,
        interpret: bool,
    ) -> Sequence[Array]:
        """Run `kernel` on every tile in order.

        Its arguments: `prefetched` in scalar memory, the tile's raw rows, the norm's weight, cos, sin, the pools (where
        they come in, and again after `outputs` where they are to be changed), `scratch`, and for each pool what its
        `Pieces` need. `buffers`: for each pool how many pieces a row of the tile touches, and the shape of a piece.
        """

        def block(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
            whole = x.shape[0] == 1
            return pl.BlockSpec((1 if whole else self.tile, x.shape[1]), lambda i, *_: (0 if whole else i, 0))

        # Named, or the compiler moves a pool that fits into VMEM and back around every call.
        anywhere = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools)
        first = len(prefetched) + len(self.arrays)
        for pool, (uses, shape) in zip(pools, buffers, strict=True):
            uses = uses * self.tile
            scratch = [*scratch, pltpu.VMEM((uses + 1, *shape), pool.dtype), pltpu.SMEM((2, uses), jnp.int32)]
            scratch.append(pltpu.SemaphoreType.DMA)
        return pl.pallas_call(
            kernel,
            out_shape=[*outputs, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetched),
                grid=(self.steps,),
                in_specs=[*map(block, self.arrays), *anywhere],
                out_specs=[*map(block, outputs), *anywhere],
                scratch_shapes=scratch,
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


class Pieces:
    """Pieces of a pool in buffers: read, to be changed, written back.

    Uses of pieces are numbered in the order of the tile's rows. Those of one piece must follow each other, with none of
    another piece between them that is kept.

    Args:
        piece: of a use: whether it is kept, and a number >= 0 that names its piece.
        at: reference to the piece of a use.
        buffer: [uses + 1, *piece]; the last one is for uses that are not kept.
        places: int32 [2, uses] in scalar memory: the buffer of each use, the first use of each buffer.
    """

    def __init__(
        self,
        piece: Callable[[Array], tuple[Array, Array]],
        at: Callable[[Array], Any],
        buffer: Any,
        places: Any,
        semaphore: Any,
    ):
        self.piece, self.at, self.buffer, self.places, self.semaphore = piece, at, buffer, places, semaphore

    def start_reading(self) -> None:
        """Begin to read the pieces of all uses."""
        uses = self.buffer.shape[0] - 1

        def step(use, carry):
            count, last = carry
            kept, piece = self.piece(use)
            new = kept & (piece != last)

            @pl.when(new)
            def _():
                self.places[1, count] = use
                pltpu.make_async_copy(self.at(use), self.buffer.at[count], self.semaphore).start()

            count = count + new.astype(jnp.int32)
            self.places[0, use] = jnp.where(kept, count - 1, uses)
            return count, jnp.where(kept, piece, last)

        self.count, _ = jax.lax.fori_loop(0, uses, step, (jnp.int32(0), jnp.int32(-1)))

    def wait(self) -> None:
        """Until the copies begun last are done."""

        def step(_, unused):
            pltpu.make_async_copy(self.buffer.at[0], self.buffer.at[0], self.semaphore).wait()  # any of this size
            return unused

        jax.lax.fori_loop(0, self.count, step, 0)

    def buffer_of(self, use: Array) -> Array:
        """The buffer of a use."""
        return self.places[0, use]

    def write(self) -> None:
        """Write all pieces back."""

        def step(i, unused):
            pltpu.make_async_copy(self.buffer.at[i], self.at(self.places[1, i]), self.semaphore).start()
            return unused

        jax.lax.fori_loop(0, self.count, step, 0)
        self.wait()
