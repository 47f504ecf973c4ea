"""A block of tokens against the cache, computed by kernels: the key store of numerics `released` on TPU and GPU.

It keeps the same state as `cached_block.CachedBlock`, in the same places; stored forms go into the kernels as they
are, and nothing dequantised reaches memory.
"""

import jax.numpy as jnp
from jax import Array

from dsv41_jax import rings
from dsv41_jax.blocks import Params
from dsv41_jax.cache import CacheArrays
from dsv41_jax.cached_block import CachedBlock
from dsv41_jax.compressor import Compressor
from dsv41_jax.csa2 import Attention
from dsv41_jax.layer_plan import Run
from dsv41_jax.numerics import FEW_TOKENS, Numerics
from dsv41_jax.rope import angles, layer_frequencies
from pallas_kernels import indexer, kv_write, sparse_attention


class KernelBlock(CachedBlock):
    """See `CachedBlock`."""

    def window(
        self, state: CacheArrays, run: Run, layer: Array | int, attention: Attention, y: Array
    ) -> tuple[CacheArrays, sparse_attention.WindowKeys]:
        """See `blocks.KeyStore`. A block of few tokens reads the ring itself, which still holds all its windows."""
        ring, width = state.window, self.config.sliding_window
        ring_size = ring["codes"].shape[-2]
        floor = jnp.maximum(self.floors[run.decoder], 0)[:, None]
        few = self.block <= min(FEW_TOKENS, ring_size - width + 1)
        if not few:
            before = rings.stored_before(ring, layer, self.start, width - 1)
        codes, scales, own_codes, own_scales = kv_write.window_rows(
            self.parallel.gather_block(attention.window_projection(y)),
            attention.variables["params"]["kv_norm"]["weight"],
            *map(self.parallel.gather_block, self.angles(run.ratio > 0)),
            ring["codes"],
            ring["scales"],
            layer,
            self.start,
            self.n_valid,
            eps=self.config.rms_norm_eps,
            implementation=self.numerics.implementation,
        )
        state = state.replace(window={"codes": codes, "scales": scales})
        if few:
            position = rings.ring_positions(self.start + self.n_valid, ring_size)
        else:
            block = rings.joined(before, {"codes": own_codes, "scales": own_scales})
            if self.parallel.parts > 1:
                block = rings.part_of(block, self.first, width - 1 + self.t)
            codes, scales, layer = block["codes"][None], block["scales"][None], 0
            position = self.positions[:, :1] - (width - 1) + jnp.arange(width - 1 + self.t)
        position = jnp.where(position >= floor, position, -1)
        return state, sparse_attention.WindowKeys(codes, scales, layer, position)

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
        name, layout = f"r{compressor.ratio}", self.layouts[compressor.ratio]
        cos, sin = angles(number * compressor.ratio, layer_frequencies(self.config, True))
        page, place = self.places(compressor.ratio, number)
        options = {"page_entries": layout.entries, "eps": self.config.rms_norm_eps}
        options["implementation"] = self.numerics.implementation
        words, latent = kv_write.main_entries(
            raw,
            params["norm"]["weight"],
            cos,
            sin,
            state.main_kv[name]["words"],
            slot,
            page,
            place,
            keep,
            page_rows=layout.main_rows,
            **options,
        )
        codes, scales = kv_write.index_entries(
            compressor.apply({"params": params}, latent, method="index_projection"),
            params["k_norm"]["weight"],
            cos,
            sin,
            state.index_key[name]["codes"],
            state.index_key[name]["scales"],
            slot,
            page,
            place,
            keep,
            **options,
        )
        return state.replace(
            main_kv={**state.main_kv, name: {"words": words}},
            index_key={**state.index_key, name: {"codes": codes, "scales": scales}},
        )

    def select(
        self, state: CacheArrays, run: Run, slot: Array | int, queries: Array, weights: Array, pool: Array | None
    ) -> tuple[Array, Array | None]:
        """See `blocks.KeyStore`."""
        layout, keys = self.layouts[run.ratio], state.index_key[f"r{run.ratio}"]
        paged = indexer.PagedKeys(keys["codes"], keys["scales"], slot, self.page_table, layout.entries)
        n, k, block = self.entries[run.ratio], self.config.index_topk, self.config.candidate_block_size
        implementation = self.numerics.implementation
        # A pool that holds every block restricts nothing.
        searches = run.pool == "searches" and pool.shape[-1] < -(-n // block)

        def tile(queries: Array, weights: Array, visible: Array, pool: Array | None):
            if searches:
                scores = indexer.candidate_scores(
                    queries, weights, paged, pool, visible, block=block, implementation=implementation
                )
                chosen = indexer.select_candidates(scores, pool, k, block=block, implementation=implementation)
                return chosen, pool
            scores = indexer.scores(queries, weights, paged, visible, implementation=implementation)
            if run.pool == "builds":
                pool = indexer.candidate_blocks(
                    scores,
                    visible,
                    block=block,
                    topk=self.config.candidate_topk_blocks,
                    implementation=implementation,
                )
            return indexer.select(scores, k, implementation=implementation), pool

        visible = jnp.minimum((self.positions + 1) // run.ratio, n)
        query_bytes = 16 * queries.shape[0] * (pool.shape[-1] * block if searches else n)
        return self._by_tiles(tile, query_bytes, queries, weights, visible, pool)

    def attend(
        self,
        state: CacheArrays,
        run: Run,
        slot: Array | int,
        attention: Attention,
        q: Array,
        window: sparse_attention.WindowKeys,
        selection: Array | None,
    ) -> Array:
        """See `blocks.KeyStore`."""
        entries = None
        if selection is not None:
            layout = self.layouts[run.ratio]
            row, lane = layout.main_start(*self.places(run.ratio, jnp.maximum(selection, 0)))
            words = state.main_kv[f"r{run.ratio}"]["words"]
            entries = sparse_attention.Entries(words, slot, jnp.where(selection >= 0, row, -1), lane)
        return sparse_attention.attend(
            q,
            self.positions,
            window,
            entries,
            attention.variables["params"]["attn_sink"],
            width=self.config.sliding_window,
            implementation=self.numerics.implementation,
            temporary_bytes=self.temporary_bytes // 2,
        )


def attend_everything(q: Array, stored: rings.Ring, exists: Array, sink: Array, numerics: Numerics) -> Array:
    """Attention [B, t, H, d] where every query sees every key that exists.

    Args:
        stored: keys [B, n, ...] as a ring stores them. exists: bool [B, n]. sink: float32 [H].
    """
    n = exists.shape[1]
    position = jnp.where(exists, jnp.arange(n), -1)
    at = jnp.full(q.shape[:2], n - 1, jnp.int32)
    window = sparse_attention.WindowKeys(stored["codes"][None], stored["scales"][None], 0, position)
    options = {"width": n, "implementation": numerics.implementation}
    # In parts of few queries: the rows of a longer block would have to be the queries' own, in order.
    tiles = [slice(first, first + FEW_TOKENS) for first in range(0, q.shape[1], FEW_TOKENS)]
    parts = [sparse_attention.attend(q[:, tile], at[:, tile], window, None, sink, **options) for tile in tiles]
    return jnp.concatenate(parts, axis=1)


def key_store(numerics: Numerics) -> type[CachedBlock]:
    """The key store that computes in `numerics`."""
    return KernelBlock if numerics.kernels else CachedBlock
