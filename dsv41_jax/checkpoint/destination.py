"""Parameter leaves that are filled piece by piece where they will live.

A leaf may be far larger than the host's memory, and a process may own only some shards of it. So each local shard is
allocated once as a zero array on its device, and blocks are written into it by a donated `dynamic_update_slice`, which
works in place (on the CPU backend too). No collective runs and no other copy of the leaf exists. Small leaves are put
together on the host instead, which saves compiling an update for each of their shapes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from dsv41_jax.checkpoint.names import LeafPath
from dsv41_jax.quant import BLOCK

SMALL_LEAF_BYTES = 1 << 20
_IN_FLIGHT_BYTES = 64 << 20  # host blocks that may wait for their transfer, since dispatch is asynchronous

Placement = Callable[[str], Sharding | None]
Padded = Callable[[LeafPath, tuple[int, ...]], tuple[int, ...]]
Box = tuple[tuple[int, int], ...]  # (start, stop) along each axis


@functools.partial(jax.jit, donate_argnums=0)
def _update(target: Array, block: Array, start: tuple[Array, ...]) -> Array:
    return jax.lax.dynamic_update_slice(target, block, start)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _as_type(bits: Array, dtype: np.dtype) -> Array:
    return jax.lax.bitcast_convert_type(bits, dtype)


def _carrier(dtype: np.dtype) -> np.dtype:
    """The dtype in which a leaf is filled: integers of the same width for narrow floats.

    The CPU backend computes these in a wider type: an update of one slice would convert the whole leaf there and back.
    """
    return np.dtype({1: np.uint8, 2: np.uint16}.get(dtype.itemsize, dtype))


@dataclass
class _Piece:
    """One local shard: where it lies in the leaf, on which device (None = the default one), and its array."""

    box: Box
    device: jax.Device | None
    array: Array | np.ndarray


class _LeafBuffer:
    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None):
        self.shape, self.dtype, self.sharding, self.filled = shape, dtype, sharding, 0
        boxes: dict[jax.Device | None, Box] = {None: tuple((0, n) for n in shape)}
        if sharding is not None:
            try:
                local = sharding.addressable_devices_indices_map(shape)
            except ValueError as error:
                raise ValueError(f"params.{name}: {error}") from error
            boxes = {
                d: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for d, index in local.items()
            }
        self.pieces = []
        for device, box in boxes.items():
            local_shape = tuple(stop - start for start, stop in box)
            small = np.prod(local_shape) * dtype.itemsize <= SMALL_LEAF_BYTES
            if small:
                array = np.zeros(local_shape, dtype)
            else:
                array = jnp.zeros(local_shape, _carrier(dtype), device=device)
            self.pieces.append(_Piece(box, device, array))

    def finish(self) -> Array:
        for piece in self.pieces:
            if isinstance(piece.array, np.ndarray):
                # A copy, so that the buffer belongs to the runtime and can be donated later.
                piece.array = jax.device_put(piece.array, piece.device, may_alias=False)
            elif piece.array.dtype != self.dtype:
                piece.array = _as_type(piece.array, self.dtype)
        if self.sharding is None:
            return self.pieces[0].array
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [p.array for p in self.pieces])


def _overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(p < q for p, q in both) else None


class Destination:
    """All leaves of a pytree under construction.

    Args:
        leaves: {path: (shape, dtype)}.
        placement: sharding of a leaf by its dotted path; None, or a result of None, means the default device.
        padded: shape of a leaf with zeros at the end of its dimensions, by its path and own shape; None: its own.

    Raises:
        ValueError: a sharding does not divide its leaf, which is named.
    """

    def __init__(
        self,
        leaves: dict[LeafPath, tuple[tuple[int, ...], np.dtype]],
        placement: Placement | None = None,
        padded: Padded | None = None,
    ):
        self._shapes = {path: shape for path, (shape, _) in leaves.items()}
        self._buffers = {
            path: _LeafBuffer(
                name,
                padded(path, shape) if padded else shape,
                np.dtype(dtype),
                placement(name) if placement else None,
            )
            for path, (shape, dtype) in leaves.items()
            for name in [".".join(path)]
        }
        self._in_flight = 0
        self._touched: set[LeafPath] = set()

    @staticmethod
    def _box(index: tuple[int, ...], rows: tuple[int, int], tail: tuple[int, ...]) -> Box:
        return (*((i, i + 1) for i in index), rows, *((0, n) for n in tail))

    def wanted(self, path: LeafPath, index: tuple[int, ...], rows: tuple[int, int]) -> tuple[int, int]:
        """Those of the rows [start, stop) of the tensor at `index` that shards of this process hold: first, last + 1.

        They are equal if it holds none. The edges are multiples of a scale's rows, or those of `rows`.
        """
        buffer, axis = self._buffers[path], len(index)
        box = self._box(index, rows, self._shapes[path][axis + 1 :])
        held = [both[axis] for piece in buffer.pieces if (both := _overlap(piece.box, box))]
        if not held:
            return rows[0], rows[0]
        first, last = min(start for start, _ in held), max(stop for _, stop in held)
        return max(rows[0], first // BLOCK * BLOCK), min(rows[1], -(-last // BLOCK) * BLOCK)

    def skip(self, path: LeafPath, index: tuple[int, ...], rows: tuple[int, int]) -> None:
        """Count rows as dealt with that belong to other processes only."""
        buffer = self._buffers[path]
        buffer.filled += (rows[1] - rows[0]) * int(np.prod(self._shapes[path][len(index) + 1 :], dtype=np.int64))

    def put(self, path: LeafPath, index: tuple[int, ...], start: int, block: np.ndarray) -> None:
        """Write rows from `start` on of the tensor at stack index `index`; `block` must not change later."""
        buffer = self._buffers[path]
        box = self._box(index, (start, start + len(block)), block.shape[1:])
        stacked = block.reshape((1,) * len(index) + block.shape)
        for piece in buffer.pieces:
            both = _overlap(piece.box, box)
            if both is None:
                continue
            part = stacked[tuple(slice(p - q, r - q) for (p, r), (q, _) in zip(both, box, strict=True))]
            corner = tuple(p - q for (p, _), (q, _) in zip(both, piece.box, strict=True))
            if isinstance(piece.array, np.ndarray):
                piece.array[tuple(slice(c, c + n) for c, n in zip(corner, part.shape, strict=True))] = part
                continue
            part = part.view(_carrier(part.dtype))
            if piece.device is not None:
                part = jax.device_put(part, piece.device)
            piece.array = _update(piece.array, part, tuple(np.int32(c) for c in corner))
            self._in_flight += part.nbytes
            self._touched.add(path)
        buffer.filled += block.size
        if self._in_flight > _IN_FLIGHT_BYTES:
            self._wait()

    def _wait(self) -> None:
        jax.block_until_ready([piece.array for path in self._touched for piece in self._buffers[path].pieces])
        self._in_flight = 0
        self._touched.clear()

    def finish(self) -> dict[LeafPath, Array]:
        """The finished leaves. ValueError if some slot was filled not exactly once."""
        self._wait()
        for path, buffer in self._buffers.items():
            shape = self._shapes[path]
            if buffer.filled != np.prod(shape, dtype=np.int64):
                raise ValueError(f"{'.'.join(path)}: {buffer.filled} values were placed in a leaf of shape {shape}")
        return {path: buffer.finish() for path, buffer in self._buffers.items()}
