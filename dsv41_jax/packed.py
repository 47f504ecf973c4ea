"""Key store of the cacheless forward: whole samples, several of them packed in a row, each seeing only itself.

Windows, compression groups, candidate blocks and selection restart at every sample border. Used for training and
evaluation. Rows of at most `ForwardOptions.dense_tokens` tokens use masks over all keys; longer ones are computed in
tiles of queries, so that temporary arrays stay inside a byte budget.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dsv41_jax import quant
from dsv41_jax.blocks import Params, select_entries
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import ModelConfig
from dsv41_jax.csa2 import Attention
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.index_loss import Followed, Taught, summed_kl
from dsv41_jax.indexer import index_scores
from dsv41_jax.layer_plan import Run, source_ratios
from dsv41_jax.numerics import Numerics
from dsv41_jax.rope import angles, layer_frequencies
from dsv41_jax.tiles import by_query_tiles
from pallas_kernels.sparse_attention import training


def sample_positions(segment_ids: Array) -> Array:
    """Position of each token in its own sample, int32 [B, T]; a sample is a stretch of equal ids [B, T]."""
    t = jnp.arange(segment_ids.shape[1])
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    first = jnp.where(begins, t, 0)
    return t - jax.lax.cummax(first, axis=1)


class _Entries:
    """Where the compressed entries of one ratio come from: entry e of a row ends at token `last[e]`. The entries of a
    sample are consecutive, so a query sees those from `first` to before `stop` [B, T].
    """

    def __init__(self, positions: Array, ratio: int, block: int):
        b, t = positions.shape
        n = t // ratio
        rows = jnp.arange(b)[:, None]
        complete = positions % ratio == ratio - 1
        self.stop = jnp.cumsum(complete, axis=1)
        self.first = self.stop - (positions + 1) // ratio
        place = jnp.where(complete, self.stop - 1, n)
        last = jnp.full((b, n), -1).at[rows, place].set(jnp.broadcast_to(jnp.arange(t), (b, t)), mode="drop")
        exists = last >= 0
        self.last = jnp.maximum(last, 0)
        self.number = jnp.take_along_axis(positions, self.last, axis=1) // ratio
        if block:
            # The candidate block of each entry [B, n], and of each query's newest visible entry [B, T] (-1: none).
            self.block = jnp.maximum(jnp.cumsum(exists & (self.number % block == 0), axis=1) - 1, 0)
            newest = jnp.take_along_axis(self.block, jnp.maximum(self.stop - 1, 0), axis=1)
            self.newest_block = jnp.where(self.stop > self.first, newest, -1)

    def visible(self, first: Array, stop: Array) -> Array:
        """bool [B, t, n]: the entries that queries with these bounds [B, t] may see."""
        number = jnp.arange(self.last.shape[1])
        return (number >= first[..., None]) & (number < stop[..., None])


class PackedSamples:
    """A row of packed samples as its own key store; `state` is a dict filled by the KV sources: {(ratio, slot): (main
    KV [B, N, d], index keys [B, N, di])}.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        options: ForwardOptions,
        segment_ids: Array | None,
        shape: tuple[int, int],
        replay: Array | None = None,
        counted: Array | None = None,
    ):
        """`replay`: see `model.forward`. `counted`: float32 [B, T], 0 for queries that do not count in the index
        loss.
        """
        self.config, self.numerics, self.options = config, numerics, options
        self.packed = segment_ids is not None
        self.long = shape[1] > options.dense_tokens
        if segment_ids is None:
            segment_ids = jnp.zeros(shape, jnp.int32)
        self.counted = jnp.ones(shape, jnp.float32) if counted is None else counted
        self.positions = sample_positions(segment_ids)
        places = jnp.arange(shape[1])
        # The first key that a query's window may see, as a place in the row; the last one is its own.
        nearest = jnp.maximum(places - self.positions, places - config.sliding_window + 1)
        self.window_first = {False: nearest, True: nearest if replay is None else jnp.maximum(nearest, replay)}
        self.entries = {
            r: _Entries(self.positions, r, config.candidate_block_size) for r in source_ratios(config) if shape[1] >= r
        }
        # Made here, not at first use: that may be inside a scan, whose values must not outlive it.
        self._angles = {kind: angles(self.positions, layer_frequencies(config, kind)) for kind in (False, True)}

    def angles(self, compressed: bool) -> tuple[Array, Array]:
        """See `blocks.KeyStore`."""
        return self._angles[compressed]

    def window(self, state: Any, run: Run, layer: int, attention: Attention, y: Array) -> tuple[Any, Array]:
        """See `blocks.KeyStore`."""
        rows = attention.window_rows(y, *self.angles(run.ratio > 0))
        return state, quant.fake_q8(rows) if self.numerics.quantizes("window_kv") else rows

    def add_entries(self, state: dict, compressor: Compressor, params: Params, y: Array, slot: int) -> dict:
        """See `blocks.KeyStore`. Index keys are made from constant latents: only the index loss trains them."""
        ratio = compressor.ratio
        variables = {"params": params}
        entries = self.entries[ratio]
        b, n = entries.last.shape
        if ratio == 1:
            latent = compressor.apply(variables, y, method="latents")
        else:
            values, gates = compressor.apply(variables, y, method="project")
            token = jnp.maximum(entries.last[..., None] - (ratio - 1) + jnp.arange(ratio), 0).reshape(b, -1, 1)

            def groups(rows: Array) -> Array:
                return jnp.take_along_axis(rows, token, axis=1).reshape(b, n, ratio, rows.shape[-1])

            latent = compressor.apply(variables, groups(values), groups(gates), method="pool")
        turn = angles(entries.number * ratio, layer_frequencies(self.config, True))
        main_kv = compressor.apply(variables, latent, *turn, method="main_kv")
        index_key = compressor.apply(variables, jax.lax.stop_gradient(latent), *turn, method="index_key")
        if self.numerics.quantizes("main_kv"):
            main_kv = quant.fake_q4_main(main_kv)
        if self.numerics.quantizes("index"):
            index_key = quant.fake_q4_index(index_key)
        return {**state, (ratio, slot): (main_kv, index_key)}

    def select(
        self, state: dict, run: Run, slot: int, queries: Array, weights: Array, pool: Array | None
    ) -> tuple[Array, Array | None]:
        """See `blocks.KeyStore`."""
        entries = self.entries[run.ratio]
        keys = jax.lax.stop_gradient(state[run.ratio, slot][1])
        block = entries.block if self.packed and run.pool else None

        def tile(
            _, queries: Array, weights: Array, first: Array, stop: Array, newest: Array | None, pool: Array | None
        ):
            scores = index_scores(queries, weights, keys, self.numerics)
            return select_entries(self.config, run, scores, entries.visible(first, stop), newest, block, pool)

        newest = entries.newest_block if run.pool == "builds" else None
        inputs = (queries, weights, entries.first, entries.stop, newest, pool)
        chosen = self._by_tiles(tile, self._scoring_bytes(keys.shape[1], queries), *inputs)
        return checkpoint_name(chosen, "selection")

    def _scoring_bytes(self, keys: int, queries: Array) -> float:
        """Bytes of temporary arrays of one of queries [B, T, heads, di] that scores so many keys."""
        # Dots and weighted dots of each head; scores, their order, masks.
        return 4.0 * queries.shape[0] * keys * (2 * queries.shape[2] + 6)

    def _by_tiles(self, tile: Callable, query_bytes: float, *inputs: Array | None) -> Any:
        """`tile(number, *parts)` on all queries of a short row at once, on tiles of them in a long one."""
        if not self.long:
            return tile(jnp.int32(0), *inputs)
        size = training.tile_size(self.positions.shape[1], query_bytes, self.options.temporary_bytes)
        return by_query_tiles(tile, size, *inputs)

    def _selected_mask(self, run: Run, selection: Array) -> Array:
        """bool [B, T, N] of a selection. A gradient through it needs no scatter."""
        b, t, _ = selection.shape
        n = self.entries[run.ratio].last.shape[1]
        mask = jnp.zeros((b, t, n), bool)
        place = jnp.where(selection < 0, n, selection)
        return mask.at[jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], place].set(True, mode="drop")

    def attend(
        self,
        state: dict,
        run: Run,
        slot: int,
        attention: Attention,
        q: Array,
        window: Array,
        selection: Array | None,
    ) -> Array:
        """See `blocks.KeyStore`."""
        main_kv = None if selection is None else state[run.ratio, slot][0]
        chosen = selection if self.long or selection is None else self._selected_mask(run, selection)
        first, sink, width = self.window_first[run.decoder], attention.attn_sink, self.config.sliding_window
        options = (width, self.numerics, self.options.temporary_bytes)
        return training.attend(q, window, first, main_kv, chosen, sink, *options)

    def index_loss(
        self,
        state: dict,
        run: Run,
        slot: int,
        attention: Attention,
        q: Array,
        window: Array,
        selection: Array,
        queries: Array,
        weights: Array,
    ) -> tuple[Array, Array]:
        """See `index_loss.summed_kl`."""
        main_kv, index_key = state[run.ratio, slot]
        q, window, main_kv, sink = jax.lax.stop_gradient((q, window, main_kv, attention.attn_sink))
        entries, width, size = self.entries[run.ratio], self.config.sliding_window, q.shape[1]
        selected = self.options.index_loss == "selected"
        chosen = (entries.first, entries.stop)
        if selected:
            chosen = (selection if self.long else self._selected_mask(run, selection),)
        if self.long:
            n = selection.shape[-1] if selected else main_kv.shape[1]
            query_bytes = training.attention_bytes(q, width, n, selected) + self._scoring_bytes(n, queries)
            size = training.tile_size(size, query_bytes, self.options.temporary_bytes)
        followed = Followed(q, window, self.window_first[run.decoder], main_kv, sink, self.counted, chosen)
        return summed_kl(Taught(queries, weights, index_key), followed, width, self.numerics, size)
