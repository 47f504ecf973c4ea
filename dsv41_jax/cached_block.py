"""A block of tokens of each row against the cache: where its layers find keys (a `blocks.KeyStore`).

Scoring and attention run in tiles of queries, and scoring in tiles of pages too, so that temporary arrays stay inside a
byte budget whatever the lengths. Tiling changes no query's result.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import indexer as index
from dsv41_jax import rings
from dsv41_jax.blocks import Params, select_entries
from dsv41_jax.cache import CacheArrays
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import ModelConfig
from dsv41_jax.csa2 import Attention
from dsv41_jax.layer_plan import Run, source_ratios
from dsv41_jax.numerics import FEW_TOKENS, Numerics
from dsv41_jax.pages import PageLayout
from dsv41_jax.rope import angles, layer_frequencies
from dsv41_jax.tiles import TEMPORARY_BYTES, largest_tile

# Fewer queries to a tile than these (or the window) save nothing: their windows overlap.
_WINDOW_TILE = 64


class CachedBlock:
    """A block of tokens per row at positions start .. start + n_valid - 1; the rest is padding and writes nothing.

    Where devices split a block (`Parallel.split_block`), queries are this device's t tokens, and the keys of all are
    gathered: every device writes the whole block into its copy of the cache.

    Attributes:
        t: this device's tokens of the block. block: all of them.
        start, n_valid: int32 [B], of the whole block.
        positions: int32 [B, t], of this device's tokens.
        write_floor: int32 [B]; entries whose group lies wholly before it are read and never written.
        temporary_bytes: budget of the temporary arrays of scoring and attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        start: Array,
        n_valid: Array,
        t: int,
        arrays: CacheArrays,
        write_floor: Array | None = None,
        temporary_bytes: int = TEMPORARY_BYTES,
    ):
        self.config, self.numerics, self.start, self.n_valid, self.t = config, numerics, start, n_valid, t
        self.parallel = numerics.parallel
        self.block, self.first = t * self.parallel.parts, self.parallel.first_token(t)
        self.temporary_bytes = temporary_bytes
        self.write_floor = jnp.zeros_like(start) if write_floor is None else write_floor
        self.positions = start[:, None] + self.first + jnp.arange(t)
        self.page_table = arrays.page_table
        self.floors = {False: arrays.encoder_floor, True: arrays.decoder_floor}
        self.layouts = {r: PageLayout.of(config, numerics, r) for r in source_ratios(config)}
        self.entries = {r: layout.entries * self.page_table.shape[1] for r, layout in self.layouts.items()}
        # Made here, not at first use: the layer loop may first ask inside a scan, whose values must not outlive it.
        self._angles = {kind: angles(self.positions, layer_frequencies(config, kind)) for kind in (False, True)}

    def angles(self, compressed: bool) -> tuple[Array, Array]:
        """See `blocks.KeyStore`."""
        return self._angles[compressed]

    # Window

    def window(
        self, state: CacheArrays, run: Run, layer: Array | int, attention: Attention, y: Array
    ) -> tuple[CacheArrays, Any]:
        """See `blocks.KeyStore`. The keys are those from W - 1 positions before the first query to the last one."""
        rows = attention.window_rows(y, *self.angles(run.ratio > 0))
        stored = rings.whole_block(rings.stored_form(rows, self.numerics), self.parallel)
        count = self.config.sliding_window - 1
        before = rings.window_before(state.window, layer, self.start, count, self.numerics)
        keys = jnp.concatenate([before, rings.values_of(stored, self.numerics)], axis=1)
        if self.parallel.parts > 1:
            keys = jax.lax.dynamic_slice_in_dim(keys, self.first, count + self.t, axis=1)
        position = self.positions[:, :1] - count + jnp.arange(count + self.t)
        exists = position >= jnp.maximum(self.floors[run.decoder], 0)[:, None]
        ring = rings.write_window(state.window, layer, stored, self.start, self.n_valid)
        return state.replace(window=ring), (keys, exists)

    # Global entries

    def places(self, ratio: int, entry: Array) -> tuple[Array, Array]:
        """Page and place int32 of entries [B, ...] of a row's sequence."""
        size = self.layouts[ratio].entries
        number = jnp.minimum(entry // size, self.page_table.shape[1] - 1)
        flat = number.reshape(number.shape[0], -1)
        return jnp.take_along_axis(self.page_table, flat, axis=1).reshape(entry.shape), entry % size

    def add_entries(
        self, state: CacheArrays, compressor: Compressor, params: Params, y: Array, slot: Array | int
    ) -> CacheArrays:
        """See `blocks.KeyStore`."""
        ratio, name = compressor.ratio, f"r{compressor.ratio}"
        variables = {"params": params}
        first = self.start // ratio  # the group that holds the block's first token
        groups = (self.block + ratio - 1) // ratio  # no more can become complete, wherever the block starts
        number = first[:, None] + jnp.arange(groups)
        if ratio == 1:
            raw = self.parallel.gather_block(compressor.apply(variables, y, method="unpooled"))
        else:
            values, gates = map(self.parallel.gather_block, compressor.apply(variables, y, method="project"))
            state, values = self._with_tail(state, "tail_values", name, slot, values, ratio)
            state, gates = self._with_tail(state, "tail_gates", name, slot, gates, ratio)
            # Row k of the joined rows belongs to position start - (ratio - 1) + k.
            row = number[..., None] * ratio + jnp.arange(ratio) - (self.start[:, None, None] - (ratio - 1))
            row = jnp.clip(row, 0, self.block + ratio - 2).reshape(row.shape[0], -1, 1)
            shape = (row.shape[0], groups, ratio, values.shape[-1])
            raw = compressor.apply(
                variables,
                jnp.take_along_axis(values, row, axis=1).reshape(shape),
                jnp.take_along_axis(gates, row, axis=1).reshape(shape),
                method="pooled",
            )
        end = (number + 1) * ratio
        keep = (end <= (self.start + self.n_valid)[:, None]) & (end > self.write_floor[:, None])
        return self._write_entries(state, compressor, params, raw, number, keep, slot)

    def _write_entries(
        self,
        state: CacheArrays,
        compressor: Compressor,
        params: Params,
        raw: Array,
        number: Array,
        keep: Array,
        slot: Array | int,
    ) -> CacheArrays:
        """Norm, rotate, quantise and store latents `raw` [B, n, d] as the entries `number` [B, n], where `keep`."""
        ratio, name = compressor.ratio, f"r{compressor.ratio}"
        variables = {"params": params}
        cos, sin = angles(number * ratio, layer_frequencies(self.config, True))
        latent = compressor.apply(variables, raw, method="normed")
        main_kv, index_key = compressor.apply(variables, latent, cos, sin, method="entries")
        layout, place = self.layouts[ratio], self.places(ratio, number)
        main = layout.write_main(state.main_kv[name], slot, *place, main_kv, keep)
        keys = layout.write_index(state.index_key[name], slot, *place, index_key, keep)
        return state.replace(main_kv={**state.main_kv, name: main}, index_key={**state.index_key, name: keys})

    def _with_tail(self, state: CacheArrays, field: str, name: str, slot, rows: Array, ratio: int):
        """Join the ratio - 1 rows before the block to its rows, and keep the block's last rows for the next one."""
        tails = getattr(state, field)
        old = rings.rows_before(tails[name], slot, self.start, ratio - 1)
        kept = rings.write_rows(tails[name], slot, rows, self.start, self.n_valid)
        return state.replace(**{field: {**tails, name: kept}}), jnp.concatenate([old, rows], axis=1)

    def index_keys(self, state: CacheArrays, ratio: int, slot: Array | int, pages: Array) -> Array:
        """Index keys [B, n * entries, di] of a source from pages int32 [B, n]."""
        return self.layouts[ratio].read_index(state.index_key[f"r{ratio}"], slot, pages)

    def visible(self, ratio: int, positions: Array) -> Array:
        """bool [B, t, N]: entries whose group is complete at the query's position [B, t]."""
        return jnp.arange(self.entries[ratio]) < ((positions + 1) // ratio)[..., None]

    def newest_block(self, ratio: int, positions: Array) -> Array:
        """int32 [B, t]: candidate block of the newest visible entry, negative if none."""
        return ((positions + 1) // ratio - 1) // self.config.candidate_block_size

    def scores(self, state: CacheArrays, ratio: int, slot: Array | int, queries: Array, weights: Array) -> Array:
        """Index scores float32 [B, t, N] of all entries of a source, in tiles of pages."""
        pages = self.page_table.shape[1]
        b, t, heads, dim = queries.shape
        size = self.layouts[ratio].entries
        # Per entry: keys unpacked (words, values, scales), then dots, weighted dots and their sum for each query.
        page_bytes = 4 * size * b * (4 * dim + 3 * t * heads)
        tile = largest_tile(pages, self.temporary_bytes / 4 / page_bytes)

        def part(table: Array) -> Array:
            keys = self.index_keys(state, ratio, slot, table)
            return index.index_scores(queries, weights, keys, self.numerics)

        if tile == pages:
            return part(self.page_table)

        def body(out: Array, i: Array) -> tuple[Array, None]:
            new = part(jax.lax.dynamic_slice_in_dim(self.page_table, i * tile, tile, axis=1))
            return jax.lax.dynamic_update_slice_in_dim(out, new, i * tile * size, axis=2), None

        empty = jnp.zeros((b, t, pages * size), jnp.float32)
        return jax.lax.scan(body, empty, jnp.arange(pages // tile))[0]

    def select(
        self, state: CacheArrays, run: Run, slot: Array | int, queries: Array, weights: Array, pool: Array | None
    ) -> tuple[Array, Array | None]:
        """See `blocks.KeyStore`."""
        ratio = run.ratio

        def tile(queries: Array, weights: Array, positions: Array, pool: Array | None):
            scores = self.scores(state, ratio, slot, queries, weights)
            newest = self.newest_block(ratio, positions) if run.pool == "builds" else None
            return select_entries(self.config, run, scores, self.visible(ratio, positions), newest, None, pool)

        # Per query: scores, masked scores, values and numbers of the sort, masks.
        query_bytes = 24 * self.entries[ratio] * queries.shape[0]
        return self._by_tiles(tile, query_bytes, queries, weights, self.positions, pool)

    # Attention

    def attend(
        self,
        state: CacheArrays,
        run: Run,
        slot: Array | int,
        attention: Attention,
        q: Array,
        window: tuple[Array, Array],
        selection: Array | None,
    ) -> Array:
        """See `blocks.KeyStore`."""
        keys, exists = window
        attend = attention.attend
        width = self.config.sliding_window
        layout = self.layouts.get(run.ratio)
        pool = state.main_kv[f"r{run.ratio}"] if layout else None

        def tile(first: Array, q: Array, selection: Array | None) -> Array:
            t = q.shape[1]
            if self.block <= FEW_TOKENS:
                column = first + jnp.arange(t)[:, None] + jnp.arange(width)
                # Each query's window by itself, as a single token reads it: sums in the order of plain decoding.
                own, there = keys[:, column], exists[:, column]
                if selection is None:
                    return attend(q, own, there, None, None)
                place = self.places(run.ratio, jnp.maximum(selection, 0))
                return attend(q, own, there, layout.read_main(pool, slot, *place), selection >= 0)
            i, j = jnp.arange(t)[:, None], jnp.arange(width - 1 + t)
            near = (i <= j) & (j < i + width)  # key j stands width - 1 positions before query j
            own, there = keys, exists
            if t != self.t:
                own = jax.lax.dynamic_slice_in_dim(keys, first, width - 1 + t, axis=1)
                there = jax.lax.dynamic_slice_in_dim(exists, first, width - 1 + t, axis=1)
            if selection is None:
                return attend(q, own, near & there[:, None], None, None)
            place = self.places(run.ratio, jnp.maximum(selection, 0))
            return attend(q, own, near & there[:, None], layout.read_main(pool, slot, *place), selection >= 0)

        b, _, heads, dim = q.shape
        chosen = 0 if selection is None else selection.shape[-1]
        most = max(_WINDOW_TILE, width)  # a tile scores the windows of all its queries
        # Per query: gathered words, values and scales; logits and probabilities.
        query_bytes = 4 * b * (4 * chosen * dim + 3 * heads * (chosen + width + most) + 3 * heads * dim)
        return self._by_tiles(tile, query_bytes, jnp.arange(self.t), q, selection, first=True, most=most)

    def _by_tiles(
        self, run: Callable, query_bytes: int, *inputs: Array | None, first: bool = False, most: int | None = None
    ) -> Any:
        """`run` on tiles of the query axis (axis 1 of the inputs), as many queries as the byte budget (and `most`)
        allows.

        With `first`, the first input is arange(t) and a tile gets its first number.
        """
        tile = largest_tile(self.t, min(self.temporary_bytes / 2 / query_bytes, most or self.t))
        if tile == self.t:
            return run(inputs[0][0] if first else inputs[0], *inputs[1:])

        def split(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(x.shape[0], -1, tile, *x.shape[2:]), 1, 0)

        rest = inputs[1:] if first else inputs
        stacked = [None if x is None else split(x) for x in rest]
        if first:
            stacked.insert(0, inputs[0][::tile])
        out = jax.lax.map(lambda parts: run(*parts), tuple(stacked))

        def join(x: Array) -> Array:
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], math.prod(x.shape[1:3]), *x.shape[3:])

        return jax.tree.map(join, out)
