"""Key store of the cacheless forward: whole samples, several of them packed in a row, each seeing only itself.

Windows, compression groups, candidate blocks and selection restart at every sample border. Used for training and
evaluation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.blocks import Params, select_entries
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import ModelConfig
from dsv41_jax.csa2 import Attention
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
    """Where the compressed entries of one ratio come from: entry e of a row ends at token `last[e]` and is `valid`."""

    def __init__(self, positions: Array, sample: Array, ratio: int, block: int):
        b, t = positions.shape
        n = t // ratio
        rows = jnp.arange(b)[:, None]
        complete = positions % ratio == ratio - 1
        place = jnp.where(complete, jnp.cumsum(complete, axis=1) - 1, n)
        self.last = jnp.full((b, n), -1).at[rows, place].set(jnp.broadcast_to(jnp.arange(t), (b, t)), mode="drop")
        self.valid = self.last >= 0
        last = jnp.maximum(self.last, 0)
        self.number = jnp.take_along_axis(positions, last, axis=1) // ratio
        self.sample = jnp.take_along_axis(sample, last, axis=1)
        self.visible = (
            self.valid[:, None]
            & (self.sample[:, None] == sample[..., None])
            & (self.number[:, None] < ((positions + 1) // ratio)[..., None])
        )
        if block:
            opens = self.valid & (self.number % block == 0)
            self.block = jnp.maximum(jnp.cumsum(opens, axis=1) - 1, 0)
            newest = jnp.max(jnp.where(self.visible, jnp.arange(n), -1), axis=-1)
            self.newest_block = jnp.where(
                newest < 0, -1, jnp.take_along_axis(self.block, jnp.maximum(newest, 0), axis=1)
            )


class PackedSamples:
    """A row of packed samples as its own key store; `state` is a dict filled by the KV sources (use an unrolled layer
    loop)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, segment_ids: Array | None, batch: int, length: int):
        self.config, self.numerics = config, numerics
        self.packed = segment_ids is not None
        if segment_ids is None:
            segment_ids = jnp.zeros((batch, length), jnp.int32)
        self.positions = sample_positions(segment_ids)
        # Number the samples, so that two that share an id but not a border stay apart.
        self.sample = jnp.cumsum(self.positions == 0, axis=1)
        back = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
        near = (back >= 0) & (back < config.sliding_window)
        self.window_mask = near[None] & (self.sample[:, :, None] == self.sample[:, None, :])
        self.entries = {
            r: _Entries(self.positions, self.sample, r, config.candidate_block_size)
            for r in source_ratios(config)
            if length >= r
        }
        self._angles: dict[bool, tuple[Array, Array]] = {}

    def angles(self, compressed: bool) -> tuple[Array, Array]:
        if compressed not in self._angles:
            self._angles[compressed] = angles(self.positions, layer_frequencies(self.config, compressed))
        return self._angles[compressed]

    def window(self, state: Any, run: Run, layer: int, attention: Attention, y: Array) -> tuple[Any, Array]:
        """See `blocks.KeyStore`."""
        rows = attention.window_rows(y, *self.angles(run.ratio > 0))
        return state, quant.fake_q8(rows) if self.numerics.quantizes("window_kv") else rows

    def add_entries(self, state: dict, compressor: Compressor, params: Params, y: Array, slot: int) -> dict:
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
        cos, sin = angles(entries.number * ratio, layer_frequencies(self.config, True))
        main_kv, index_key = compressor.apply(variables, latent, cos, sin, method="entries")
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
        return select_entries(self.config, run, scores, entries.visible, newest, block, pool)

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
        attend = attention.attend
        if selection is None:
            return attend(q, window, self.window_mask, None, None)
        main_kv = state[run.ratio, slot][0]
        b, t, _ = selection.shape
        n = main_kv.shape[1]
        # A mask over all entries: samples are short, and the gradient needs no scatter.
        mask = (
            jnp.zeros((b, t, n), bool)
            .at[jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], jnp.where(selection < 0, n, selection)]
            .set(True, mode="drop")
        )
        return attend(q, window, self.window_mask, main_kv, mask)
