"""Runs blocks of tokens through the jitted step: buckets, Engram input, and the host's part of the cache. Which blocks
a prompt is read in: `ced`.

Blocks have few static lengths, so few programs are compiled; `compilations()` counts them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dsv41_jax import dspark, model, sharded_step, sharding
from dsv41_jax.blocks import Params
from dsv41_jax.cache import (
    MAX_REWIND,
    Cache,
    CacheArrays,
    page_tables,
    pages_for,
    put_rows,
    take_rows,
    zero_arrays,
)
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import DEAD, EngramHasher
from dsv41_jax.engram_prefetch import PrefetchingTable
from dsv41_jax.engram_share import EngramShare, PartSender, arranged
from dsv41_jax.numerics import Numerics

_SMALLEST_BLOCK = 8  # an anchor and the drafts of the released model fit
_SMALLEST_CACHE = 256

_compiled = 0


def compilations() -> int:
    """Number of model programs compiled by this process so far (steps, drafts, losses), one per distinct shape and
    setting.
    """
    return _compiled


def counted(function: Callable) -> Callable:
    """Count each tracing of a function that is about to be jitted."""

    @functools.wraps(function)
    def traced(*args, **kwargs):
        global _compiled
        _compiled += 1
        return function(*args, **kwargs)

    return traced


_STATIC = ("config", "numerics", "layers", "all_logits", "mesh", "rows", "dispatch")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("arrays",))
@counted
def _extend(
    params: Params,
    arrays: CacheArrays,
    first: Array | None,
    token_ids: Array,
    start: Array,
    n_valid: Array,
    write_floor: Array,
    memory: dict[str, Array],
    image_mask: Array | None,
    image_embeds: Array | None,
    *,
    config: ModelConfig,
    numerics: Numerics,
    layers: str,
    all_logits: bool,
    mesh: Mesh | None,
    rows: int | None,
    dispatch: str | None,
) -> tuple[Array | None, CacheArrays]:
    """`model.extend` of all rows, or of as many as the inputs have, from row `first` (int32 scalar) on.

    On a mesh: of all rows, or of each device's from `first` (int32 [devices that share rows]) on; logits of the first
    `rows` of the inputs', whole on every device.
    """
    if mesh is not None:
        inputs = (token_ids, start, n_valid, memory, image_mask, image_embeds, write_floor)
        options = {"first": first, "layers": layers, "all_logits": all_logits, "dispatch": dispatch}
        logits, arrays = sharded_step.extend(mesh, config, numerics, params, arrays, *inputs, **options)
        return sharded_step.replicated(mesh, logits, rows), arrays
    step = functools.partial(model.extend, config, numerics, params, layers=layers, all_logits=all_logits)
    inputs = (token_ids, start, n_valid, memory, image_mask, image_embeds, write_floor)
    if first is None:
        return step(arrays, *inputs)
    logits, own = step(take_rows(arrays, first, len(token_ids)), *inputs)
    return logits, put_rows(arrays, own, first)


@functools.partial(jax.jit, static_argnames=("config", "numerics", "mesh", "rows"))
@counted
def _draft(
    params: Params,
    arrays: CacheArrays,
    anchor: Array,
    start: Array,
    temperature: Array,
    key: Array,
    *,
    config,
    numerics,
    mesh,
    rows,
):
    if mesh is not None:
        out = sharded_step.draft(mesh, config, numerics, params, arrays, anchor, start, temperature, key)
        return sharded_step.replicated(mesh, out, rows)
    return dspark.draft(config, numerics, params, arrays, anchor, start, temperature, key)


def block_bucket(tokens: int) -> int:
    """Static length of a block of `tokens` tokens: 1, or a power of two from 8 on."""
    return 1 if tokens == 1 else max(_SMALLEST_BLOCK, 1 << (tokens - 1).bit_length())


def cache_bucket(tokens: int) -> int:
    """Static cache length that holds `tokens`: a power of two from 256 on."""
    return max(_SMALLEST_CACHE, 1 << (tokens - 1).bit_length())


def step_sizes(numerics: Numerics) -> tuple[int, int]:
    """`prefill_block` and `decode_rows` of a runner: on accelerators small steps would leave them idle."""
    return (512, 64) if numerics.implementation in ("tpu", "gpu") else (64, 4)


class Runner:
    """A model's parameters with everything a step needs from the host.

    Attributes:
        hasher: Engram hash of the token map, or None without Engram layers.
        tables: {layer: table} for Engram tables off the device; layers not in it have theirs in `params`.
        prefill_block: tokens of a row that one prefill step takes. It is the same for every prompt: another length may
            round differently, and a prompt's numbers must not depend on how long its neighbours are.
        decode_rows: rows that one decode step takes; more are decoded in tiles, because the order of a sum depends on
            the number of rows from some size on (on a CPU, 1, 2 and 4 give the same bits). Of both: `step_sizes`.
        mesh: devices that the model is spread over, or None. On a mesh every step runs all rows of a cache together,
            which is padded to a multiple of the devices that share rows.
        dispatch: on a mesh, how tokens reach experts; see `expert_parallel`.
    """

    prefill_block: int
    decode_rows: int

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        params: Params,
        hasher: EngramHasher | None,
        tables: Mapping[int, PrefetchingTable | EngramShare],
        mesh: Mesh | None = None,
        dispatch: str | None = None,
    ):
        self.config, self.numerics, self.params = config, numerics, params
        self.hasher, self.tables, self.mesh, self.dispatch = hasher, dict(tables), mesh, dispatch
        self._send = None if mesh is None else PartSender(mesh)
        self.prefill_block, self.decode_rows = step_sizes(numerics)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache for `batch` rows of at most `max_len` tokens, each with pages of its own."""
        if self.mesh is not None:
            arrays = sharding.zero_cache(self.config, self.numerics, self.mesh, batch, max_len)
        else:
            arrays = zero_arrays(self.config, self.numerics, batch, max_len)
        zero = np.zeros(batch, np.int32)
        tables = page_tables(len(arrays.encoder_floor), pages_for(max_len), self.row_shards)[:batch]
        own = (tables, np.zeros((2, batch), np.int32))
        history = self.empty_history(batch)
        shared = (self.mesh, self.row_shards)
        return Cache(arrays, zero, zero, history, max_len, self.numerics.name, zero, *own, *shared)

    @property
    def row_shards(self) -> int:
        """Devices among which the rows of a cache are split; pages count within each."""
        return 1 if self.mesh is None else sharded_step.parallel_of(self.mesh).row_shards

    def empty_history(self, batch: int) -> np.ndarray | None:
        """Id history of sequences that have not begun, long enough to rewind; None without Engram."""
        if self.hasher is None:
            return None
        return np.full((batch, self.hasher.lookback + MAX_REWIND), DEAD, np.int64)

    def step(
        self,
        arrays: CacheArrays,
        token_ids: np.ndarray,
        start: np.ndarray,
        n_valid: np.ndarray,
        memory: dict[str, Array],
        image_mask: np.ndarray | None = None,
        image_embeds: np.ndarray | None = None,
        first: int | np.ndarray | None = None,
        write_floor: np.ndarray | None = None,
        layers: str = "all",
        all_logits: bool = False,
    ) -> tuple[Array | None, CacheArrays]:
        """One program: `model.extend` of all rows of the cache, or of those from `first` on that the inputs have; on a
        mesh of all rows, or of one of each device: `first` int32 [row_shards] counts within the device. `arrays` are
        donated.
        """
        rows, of_devices = len(token_ids), isinstance(first, np.ndarray)
        everything = not of_devices and (self.mesh is not None or len(arrays.encoder_floor) == rows)
        put = functools.partial(self.put, rows=len(arrays.encoder_floor) if everything else rows)
        logits, arrays = _extend(
            self.params,
            arrays,
            None if everything else put(np.asarray(first, np.int32)) if of_devices else jnp.int32(first),
            put(np.asarray(token_ids, np.int32)),
            put(np.asarray(start, np.int32)),
            put(np.asarray(n_valid, np.int32)),
            put(np.zeros(rows, np.int32) if write_floor is None else np.asarray(write_floor, np.int32)),
            memory,
            None if image_mask is None else put(image_mask),
            None if image_embeds is None else put(image_embeds),
            config=self.config,
            numerics=self.numerics,
            layers=layers,
            all_logits=all_logits or (token_ids.shape[1] == 1 and layers == "all"),  # one program less
            mesh=self.mesh,
            rows=rows if self.mesh is not None else None,
            dispatch=self.dispatch,
        )
        return self.local(logits), arrays

    def put(self, array: np.ndarray, rows: int) -> Array:
        """An input [B, ...] on the device, or spread by rows over the mesh, zeros up to `rows`."""
        if self.mesh is None:
            return jnp.asarray(array)
        padded = np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))
        where = sharding.shardings(self.mesh, sharded_step.ROWS)
        return jax.make_array_from_callback(padded.shape, where, padded.__getitem__)

    def local(self, tree: Any) -> Any:
        """Results that every device of the mesh has whole, as arrays of one device of this process."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)

    def extend(
        self,
        cache: Cache,
        token_ids: np.ndarray,
        n_valid: np.ndarray,
        image_mask: np.ndarray | None = None,
        image_embeds: np.ndarray | None = None,
        all_logits: bool = False,
    ) -> tuple[Array, Cache]:
        """All layers on token_ids [B, t] of which n_valid [B] count; the cache is spent.

        Single tokens run in tiles of `decode_rows` rows, blocks of several tokens row by row: the order of a sum may
        depend on how many rows there are, and a row's numbers must not depend on its neighbours.

        Returns:
            logits [B, V] or [B, t, V], and the cache.
        """
        b, t = token_ids.shape
        end = cache.lengths + n_valid
        if (end > cache.max_len).any():
            raise ValueError(
                f"{int(end.max())} tokens do not fit the cache: it holds max_len={cache.max_len} a row "
                "(see prefill's max_len)"
            )
        rows, history = self._engram_rows(cache, token_ids, n_valid, image_mask)
        arrays, start = cache.take(), cache.lengths
        pieces, height = [], b if self.mesh is not None else self.decode_rows if t == 1 else 1
        for first in range(0, b, height):
            tile = slice(first, min(first + height, b))
            out, arrays = self.step(
                arrays,
                *(x[tile] for x in (token_ids, start, n_valid)),
                self.engram_input(None if rows is None else rows[:, tile], arrays),
                *(None if x is None else x[tile] for x in (image_mask, image_embeds)),
                first=first,
                all_logits=all_logits,
            )
            pieces.append(out)
        logits = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
        if t == 1 and not all_logits:
            logits = logits[:, 0]
        end = end.astype(np.int32)
        return logits, dataclasses.replace(
            cache, arrays=arrays, lengths=end, written=np.maximum(cache.written, end), history=history
        )

    def _engram_rows(self, cache: Cache, token_ids: np.ndarray, n_valid: np.ndarray, image_mask: np.ndarray | None):
        """Row numbers int32 [layers, B, t, columns] of a block, and the id history after it; both None without
        Engram.
        """
        if self.hasher is None:
            return None, None
        compressed = self.hasher.compress(token_ids, image_mask)
        rows = self.hasher.hash(compressed, cache.history[:, -self.hasher.lookback :])
        # Padding reads the rows of the last real token, so that tables off the device read nothing for it.
        place = np.minimum(np.arange(token_ids.shape[1]), np.maximum(n_valid - 1, 0)[:, None])
        rows = np.take_along_axis(rows, place[None, :, :, None], axis=2)
        joined = np.concatenate([cache.history, compressed], axis=1)
        keep = n_valid[:, None] + np.arange(cache.history.shape[1])
        return rows, np.take_along_axis(joined, keep, axis=1)

    def engram_input(
        self, rows: np.ndarray | None, arrays: CacheArrays | None = None, of_devices: bool = False
    ) -> dict[str, Array]:
        """Row numbers [layers, B, t, columns] -> the step's input: numbers for tables on the device, rows for the
        others.

        Args:
            arrays: the cache of the step, whose rows it is made for; None without a cache.
            of_devices: the step has one row of each device of the mesh, and `rows` is for these.
        """
        memory = {}
        batch = 0 if rows is None else self.padded_rows(rows.shape[1])
        if arrays is not None and not of_devices:
            batch = len(arrays.encoder_floor)
        block = 1 if arrays is None else rows.shape[2] if rows is not None else 0  # without a cache it is not split
        for i, layer in enumerate(() if rows is None else self.hasher.layer_ids):
            value = self.tables[layer].rows(rows[i]) if layer in self.tables else rows[i].astype(np.int32)
            if isinstance(self.tables.get(layer), EngramShare):
                memory[f"l{layer}"] = self._put_part(value, batch, block)
            else:
                memory[f"l{layer}"] = self.put(value, batch)
        return memory

    def padded_rows(self, rows: int) -> int:
        """Rows of a batch with those that fill it up on a mesh."""
        return rows if self.mesh is None else sharding.padded_rows(rows, sharding.layout_of(self.mesh))

    def _put_part(self, part: np.ndarray, rows: int, block: int) -> Array:
        """This process's part of Engram rows on the mesh, see `engram_share`; zeros up to `rows` rows."""
        padded = np.pad(part, [(0, rows - len(part))] + [(0, 0)] * (part.ndim - 1))
        parallel = sharded_step.parallel_of(self.mesh, block, sharded_step.local_rows(self.mesh, rows))
        return self._send(arranged(padded, parallel))

    def announce_engram(self, rows: np.ndarray) -> None:
        """Let the tables off the device read the rows of a later block [layers, B, t, columns] in the background."""
        for i, layer in enumerate(self.hasher.layer_ids):
            if layer in self.tables:
                self.tables[layer].prefetch(rows[i])

    def draft(self, cache: Cache, anchor: np.ndarray, temperature: float, key: Array) -> tuple[Array, Array, Array]:
        """One draft round; the cache is only read. See `dspark.draft`."""
        arrays, batch = cache.peek(), len(anchor)
        rows = len(arrays.encoder_floor)
        if self.mesh is not None:
            data = jax.random.key_data(key if key.ndim else jax.random.split(key, batch))
            key = jax.random.wrap_key_data(self.put(np.asarray(data), rows), impl=jax.random.key_impl(key))
        out = _draft(
            self.params,
            arrays,
            self.put(np.asarray(anchor, np.int32), rows),
            self.put(cache.lengths, rows),
            np.float32(temperature),
            key,
            config=self.config,
            numerics=self.numerics,
            mesh=self.mesh,
            rows=batch if self.mesh is not None else None,
        )
        return self.local(out)
