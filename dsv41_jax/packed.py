"""Key store of the cacheless forward: whole samples, several of them packed in a row, each seeing only itself.

Windows, compression groups, candidate blocks and selection restart at every sample border. Used for training and
evaluation. Rows of at most `ForwardOptions.dense_tokens` tokens use masks over all keys; longer ones are computed in
tiles of queries, so that temporary arrays stay inside a byte budget.
"""

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
from dsv41_jax.index_loss import entry_attention, index_kl
from dsv41_jax.indexer import index_scores
from dsv41_jax.layer_plan import Run, source_ratios
from dsv41_jax.numerics import Numerics
from dsv41_jax.rope import angles, layer_frequencies


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
            self.block = jnp.maximum(jnp.cumsum(exists & (self.number % block == 0), axis=1) - 1, 0)
            newest = jnp.take_along_axis(self.block, jnp.maximum(self.stop - 1, 0), axis=1)
            self.newest_block = jnp.where(self.stop > self.first, newest, -1)


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

    def window_mask(self, run: Run) -> Array:
        """bool [B, T, T]: the keys of each query's window."""
        places = jnp.arange(self.positions.shape[1])
        return (places >= self.window_first[run.decoder][..., None]) & (places <= places[:, None])

    def visible(self, ratio: int) -> Array:
        """bool [B, T, N]: the entries that each query may see."""
        entries = self.entries[ratio]
        number = jnp.arange(entries.last.shape[1])
        return (number >= entries.first[..., None]) & (number < entries.stop[..., None])

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
        scores = index_scores(queries, weights, keys, self.numerics)
        newest = entries.newest_block if run.pool == "builds" else None
        block = entries.block if self.packed and run.pool else None
        chosen = select_entries(self.config, run, scores, self.visible(run.ratio), newest, block, pool)
        return checkpoint_name(chosen, "selection")

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
        mask = self.window_mask(run)
        if selection is None:
            return checkpoint_name(attention.attend(q, window, mask, None, None), "attention")
        main_kv = state[run.ratio, slot][0]
        out = attention.attend(q, window, mask, main_kv, self._selected_mask(run, selection))
        return checkpoint_name(out, "attention")

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
        """Sum of the KL over the counted queries of an index source that see an entry, and their number."""
        main_kv, index_key = state[run.ratio, slot]
        q, window, main_kv, sink = jax.lax.stop_gradient((q, window, main_kv, attention.attn_sink))
        mask = self.visible(run.ratio)
        if self.options.index_loss == "selected":
            mask = self._selected_mask(run, selection)
        scores = index_scores(queries, weights, index_key, self.numerics)
        p = entry_attention(q, window, self.window_mask(run), main_kv, mask, sink)
        kl = index_kl(p, scores, mask)
        counted = jnp.any(mask, axis=-1) * self.counted
        return jnp.sum(kl * counted), jnp.sum(counted)
