"""Per-sequence state as a typed pytree, indexed by absolute position, and the block of tokens that reads and extends
it.

    window       [L, B, R, d]       ring of the last rows of each layer, position p in slot p mod R
    draft_window [M, B, R, d]       the same for the draft blocks, fed from the tapped layers
    main_kv      r<ratio>: [S, B, N, d]    one entry per group of `ratio` tokens, for each KV source of that ratio
    index_key    r<ratio>: [S, B, N, di]
    tail         r<ratio>: values, gates [S, B, R', d] float32: raw compressor rows of the last tokens (ratio > 1)

Going back to a shorter length needs no copying: rings are larger than the window by `MAX_REWIND` rows, and everything
else past the length is not visible and will be written again. The values stored here are quantised where the numerics
quantise, in the activation dtype.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.blocks import Params
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import source_ratios, sources_of_ratio
from dsv41_jax.numerics import Numerics
from dsv41_jax.rope import angles, layer_frequencies

MAX_REWIND = 16


@flax.struct.dataclass
class CacheArrays:
    """The device side of a cache; shapes in the module docstring."""

    window: Array
    draft_window: Array
    main_kv: dict[str, Array]
    index_key: dict[str, Array]
    tail_values: dict[str, Array]
    tail_gates: dict[str, Array]


def ring_size(config: ModelConfig) -> int:
    """Rows of a window ring."""
    return config.sliding_window + MAX_REWIND


def abstract_arrays(config: ModelConfig, numerics: Numerics, batch: int, max_len: int) -> CacheArrays:
    """Shapes and dtypes of the arrays for `batch` sequences of at most `max_len` tokens."""
    ring, d, dtype = ring_size(config), config.head_dim, numerics.dtype

    def spec(*shape: int, dtype=dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ratios = {r: len(sources_of_ratio(config, r)) for r in source_ratios(config)}
    tails = {f"r{r}": spec(s, batch, r - 1 + MAX_REWIND, d, dtype=jnp.float32) for r, s in ratios.items() if r > 1}
    return CacheArrays(
        window=spec(config.num_hidden_layers, batch, ring, d),
        draft_window=spec(config.n_draft, batch, ring, d),
        main_kv={f"r{r}": spec(s, batch, max(1, max_len // r), d) for r, s in ratios.items()},
        index_key={f"r{r}": spec(s, batch, max(1, max_len // r), config.index_head_dim) for r, s in ratios.items()},
        tail_values=tails,
        tail_gates=tails,
    )


def zero_arrays(config: ModelConfig, numerics: Numerics, batch: int, max_len: int) -> CacheArrays:
    """An empty cache. Every leaf is its own buffer: caches are donated."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract_arrays(config, numerics, batch, max_len))


def ring_positions(end: Array, size: int) -> Array:
    """Position held by each slot of a ring after `end` tokens: int32 [B, size], negative for a slot not written yet."""
    last = end[:, None] - 1
    return last - (last - jnp.arange(size)) % size


def ring_write(ring: Array, lead: Any, rows: Array, start: Array, n_valid: Array) -> Array:
    """Write the last min(n_valid, size) valid rows into ring[lead] ([B, size, d]).

    Args:
        rows: [B, t, d], row i belongs to position start + i; rows past n_valid are padding and write nothing.
    """
    b, t, _ = rows.shape
    size = ring.shape[-2]
    i = jnp.arange(t)
    keep = (i < n_valid[:, None]) & (i >= n_valid[:, None] - size)
    slot = jnp.where(keep, (start[:, None] + i) % size, size)
    return ring.at[lead, jnp.arange(b)[:, None], slot].set(rows.astype(ring.dtype), mode="drop")


class CachedBlock:
    """A block of t tokens per row, against the cache (a `blocks.KeyStore` whose state is `CacheArrays`)."""

    def __init__(self, config: ModelConfig, start: Array, n_valid: Array, t: int, arrays: CacheArrays):
        self.config, self.start, self.n_valid, self.t = config, start, n_valid, t
        self.positions = start[:, None] + jnp.arange(t)
        self.entries = {r: arrays.main_kv[f"r{r}"].shape[2] for r in source_ratios(config)}
        # Made here, not at first use: the layer loop may first ask inside a scan, whose values must not outlive it.
        self._angles = {kind: angles(self.positions, layer_frequencies(config, kind)) for kind in (False, True)}
        window = config.sliding_window
        held = ring_positions(start, arrays.window.shape[-2])[:, None, :]
        query = self.positions[:, :, None]
        i = jnp.arange(t)
        own = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < window)
        self.window_mask = jnp.concatenate(
            [(held >= 0) & (query - held < window), jnp.broadcast_to(own, (start.shape[0], t, t))], axis=-1
        )

    def angles(self, compressed: bool) -> tuple[Array, Array]:
        return self._angles[compressed]

    def window(self, state: CacheArrays, layer: Array | int, rows: Array) -> tuple[CacheArrays, Array, Array]:
        old = (
            state.window[layer]
            if isinstance(layer, int)
            else jax.lax.dynamic_index_in_dim(state.window, layer, keepdims=False)
        )
        keys = jnp.concatenate([old, rows.astype(old.dtype)], axis=1)
        ring = ring_write(state.window, layer, rows, self.start, self.n_valid)
        return state.replace(window=ring), keys, self.window_mask

    def add_entries(
        self, state: CacheArrays, compressor: Compressor, params: Params, y: Array, slot: Array | int
    ) -> CacheArrays:
        ratio, name = compressor.ratio, f"r{compressor.ratio}"
        variables = {"params": params}
        first = self.start // ratio  # the group that holds the block's first token
        groups = (self.t + ratio - 1) // ratio  # no more can become complete, wherever the block starts
        number = first[:, None] + jnp.arange(groups)
        if ratio == 1:
            latent = compressor.apply(variables, y, method="latents")
        else:
            values, gates = compressor.apply(variables, y, method="project")
            state, values = self._with_tail(state, "tail_values", name, slot, values, ratio)
            state, gates = self._with_tail(state, "tail_gates", name, slot, gates, ratio)
            # Row k of the joined rows belongs to position start - (ratio - 1) + k.
            row = number[..., None] * ratio + jnp.arange(ratio) - (self.start[:, None, None] - (ratio - 1))
            row = jnp.clip(row, 0, self.t + ratio - 2).reshape(row.shape[0], -1, 1)
            shape = (row.shape[0], groups, ratio, values.shape[-1])
            latent = compressor.apply(
                variables,
                jnp.take_along_axis(values, row, axis=1).reshape(shape),
                jnp.take_along_axis(gates, row, axis=1).reshape(shape),
                method="pool",
            )
        cos, sin = angles(number * ratio, layer_frequencies(self.config, True))
        main_kv, index_key = compressor.apply(variables, latent, cos, sin, method="entries")
        complete = (number + 1) * ratio <= (self.start + self.n_valid)[:, None]
        target = jnp.where(complete, number, self.entries[ratio])
        rows = jnp.arange(y.shape[0])[:, None]

        def write(cache: dict[str, Array], new: Array) -> dict[str, Array]:
            return {**cache, name: cache[name].at[slot, rows, target].set(new.astype(cache[name].dtype), mode="drop")}

        return state.replace(main_kv=write(state.main_kv, main_kv), index_key=write(state.index_key, index_key))

    def _with_tail(self, state: CacheArrays, field: str, name: str, slot, rows: Array, ratio: int):
        """Join the ratio - 1 rows before the block to its rows, and keep the block's last rows for the next one."""
        tails = getattr(state, field)
        size = tails[name].shape[-2]
        before = (self.start[:, None] - (ratio - 1) + jnp.arange(ratio - 1)) % size
        old = tails[name][slot, jnp.arange(rows.shape[0])[:, None], before]
        kept = ring_write(tails[name], slot, rows, self.start, self.n_valid)
        return state.replace(**{field: {**tails, name: kept}}), jnp.concatenate([old, rows], axis=1)

    def index_keys(self, state: CacheArrays, ratio: int, slot: Array | int) -> Array:
        return state.index_key[f"r{ratio}"][slot]

    def selected(self, state: CacheArrays, ratio: int, slot: Array | int, selection: Array) -> tuple[Array, Array]:
        rows = jnp.arange(selection.shape[0])[:, None, None]
        return state.main_kv[f"r{ratio}"][slot, rows, jnp.maximum(selection, 0)], selection >= 0

    def visible(self, ratio: int) -> Array:
        return jnp.arange(self.entries[ratio]) < ((self.positions + 1) // ratio)[..., None]

    def newest_block(self, ratio: int) -> Array:
        return ((self.positions + 1) // ratio - 1) // self.config.candidate_block_size

    def entry_block(self, ratio: int) -> None:
        return None


@dataclasses.dataclass
class Cache:
    """State of a batch of sequences, as the public calls pass it around.

    A call that takes a cache donates it: the cache passed in is spent, and using it again is an error.

    Attributes:
        arrays: the device arrays.
        lengths: int32 [B], tokens seen by each row.
        written: int32 [B], the furthest position written; rows past `lengths` still occupy ring slots.
        history: int64 [B, H] compressed ids of the last tokens for the Engram hash (newest last, -1 for none), or None
            without Engram.
        max_len: tokens a row can hold.
    """

    arrays: CacheArrays | None
    lengths: np.ndarray
    written: np.ndarray
    history: np.ndarray | None
    max_len: int

    @property
    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back."""
        return MAX_REWIND

    def take(self) -> CacheArrays:
        """Hand the arrays over to a call that donates them.

        Raises:
            RuntimeError: they were handed over before.
        """
        if self.arrays is None:
            raise RuntimeError("this cache was donated to an earlier call: continue with the cache that call returned")
        arrays, self.arrays = self.arrays, None
        return arrays

    def peek(self) -> CacheArrays:
        """The arrays for a call that only reads them; RuntimeError when they were donated before."""
        if self.arrays is None:
            raise RuntimeError("this cache was donated to an earlier call: continue with the cache that call returned")
        return self.arrays

    def rewind(self, lengths: np.ndarray) -> "Cache":
        """Forget everything past `lengths` [B].

        Raises:
            ValueError: a length is negative, larger than the present one, or more than `max_rewind` tokens back.
        """
        lengths = np.asarray(lengths, np.int32)
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"rewind needs one length for each of {self.lengths.shape[0]} rows, got shape {lengths.shape}"
            )
        oldest = np.maximum(self.written - MAX_REWIND, 0)
        if (lengths > self.lengths).any() or (lengths < oldest).any():
            raise ValueError(
                f"cannot rewind from {self.lengths.tolist()} to {lengths.tolist()}: rows can go back to "
                f"{oldest.tolist()} ({MAX_REWIND} tokens before the furthest one written) and not forward"
            )
        history = self.history
        if history is not None:
            column = np.arange(history.shape[1]) - (self.lengths - lengths)[:, None]
            history = np.where(column >= 0, np.take_along_axis(history, np.maximum(column, 0), axis=1), -1)
        return Cache(self.take(), lengths, self.written, history, self.max_len)
