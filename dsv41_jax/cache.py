"""Per-sequence state as a typed pytree, indexed by absolute position.

    window        ring of the last rows of each layer [L, B, R, d]; see `rings`
    draft_window  the same for the draft blocks, fed from the tapped layers
    main_kv       r<ratio>: pool of pages, an entry per group of `ratio` tokens and KV source of that ratio; see `pages`
    index_key     r<ratio>: pool of pages
    tail_values, tail_gates   r<ratio>: float32 [S, B, R', d], raw compressor rows of the last tokens (ratio > 1)
    page_table    int32 [B, P]: the pages that hold a row's tokens 0..127, 128..255, ...
    encoder_floor, decoder_floor   int32 [B]: window rows of earlier positions do not exist in those layers

Rings, tails and floors belong to a row; pages belong to whichever rows name them. Going back to a shorter length needs
no copying: rings are larger than the window by `MAX_REWIND` rows, and everything else past the length is not visible
and will be written again.

How the values are stored is a property of the numerics: `released` packs them (FP4 entries, FP8 rows), the others keep
plain rows in the activation dtype.
"""

import dataclasses
import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import source_ratios, sources_of_ratio
from dsv41_jax.numerics import RELEASED, Numerics
from dsv41_jax.pages import PAGE_TOKENS, PageLayout, Pool
from dsv41_jax.rings import Ring, abstract_ring

MAX_REWIND = 16


@flax.struct.dataclass
class CacheArrays:
    """The device side of a cache; shapes in the module docstring."""

    window: Ring
    draft_window: Ring
    main_kv: dict[str, Pool]
    index_key: dict[str, Pool]
    tail_values: dict[str, Array]
    tail_gates: dict[str, Array]
    page_table: Array
    encoder_floor: Array
    decoder_floor: Array


def ring_size(config: ModelConfig) -> int:
    """Rows of a window ring."""
    return config.sliding_window + MAX_REWIND


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return max(1, -(-tokens // PAGE_TOKENS))


def abstract_arrays(
    config: ModelConfig, numerics: Numerics, batch: int, max_len: int, pages: int | None = None
) -> CacheArrays:
    """Shapes and dtypes of the arrays for `batch` sequences of at most `max_len` tokens.

    Args:
        pages: pages of the pools; default: enough for every row to own its pages.
    """
    per_row = pages_for(max_len)
    pages = batch * per_row if pages is None else pages
    ring = functools.partial(abstract_ring, numerics, batch=batch, size=ring_size(config), dim=config.head_dim)
    layouts = {r: PageLayout.of(config, numerics, r) for r in source_ratios(config)}
    sources = {r: len(sources_of_ratio(config, r)) for r in layouts}
    tails = {
        f"r{r}": jax.ShapeDtypeStruct((sources[r], batch, r - 1 + MAX_REWIND, config.head_dim), jnp.float32)
        for r in layouts
        if r > 1
    }
    floor = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return CacheArrays(
        window=ring(config.num_hidden_layers),
        draft_window=ring(config.n_draft),
        main_kv={f"r{r}": layout.abstract_main(sources[r], pages) for r, layout in layouts.items()},
        index_key={f"r{r}": layout.abstract_index(sources[r], pages) for r, layout in layouts.items()},
        tail_values=tails,
        tail_gates=tails,
        page_table=jax.ShapeDtypeStruct((batch, per_row), jnp.int32),
        encoder_floor=floor,
        decoder_floor=floor,
    )


def zero_arrays(
    config: ModelConfig, numerics: Numerics, batch: int, max_len: int, pages: int | None = None
) -> CacheArrays:
    """An empty cache in which row b owns pages b * P .. (b + 1) * P - 1. Every leaf is its own buffer: caches are
    donated.

    With `pages` given, rows own no page yet (all tables name page 0): set `page_table`.
    """
    specs = abstract_arrays(config, numerics, batch, max_len, pages)
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), specs)
    if pages is not None:
        return arrays
    return arrays.replace(page_table=jnp.asarray(page_tables(batch, arrays.page_table.shape[1])))


def page_tables(batch: int, per_row: int, shards: int = 1) -> np.ndarray:
    """int32 [batch, per_row]: every row owns the next `per_row` pages of its shard (batch / shards rows each)."""
    rows = np.arange(batch, dtype=np.int32) % (batch // shards)
    return rows[:, None] * per_row + np.arange(per_row, dtype=np.int32)


def global_bytes_per_token(config: ModelConfig, numerics: Numerics = RELEASED) -> float:
    """Bytes of main KV and index keys that one more token costs, over all KV sources (released model: 890).

    Counted from abstract arrays, as the difference of two cache lengths.
    """
    short, long = 64 * PAGE_TOKENS, 128 * PAGE_TOKENS

    def size(max_len: int) -> int:
        arrays = abstract_arrays(config, numerics, 1, max_len)
        return _nbytes((arrays.main_kv, arrays.index_key))

    return (size(long) - size(short)) / (long - short)


def window_bytes(config: ModelConfig, numerics: Numerics = RELEASED) -> int:
    """Bytes of a sequence's rings (draft windows too) and compressor tails, whatever its length."""
    arrays = abstract_arrays(config, numerics, 1, PAGE_TOKENS)
    return _nbytes((arrays.window, arrays.draft_window, arrays.tail_values, arrays.tail_gates))


def _nbytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


_ROW_STATE = ("window", "draft_window", "tail_values", "tail_gates")  # batch axis 1
_ROW_NUMBERS = ("page_table", "encoder_floor", "decoder_floor")  # batch axis 0


def take_rows(arrays: CacheArrays, first: Array, count: int = 1) -> CacheArrays:
    """The cache of `count` rows from `first` (int32 scalar) on: their own state, and all pages."""

    def pick(name: str, axis: int):
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, count, axis), getattr(arrays, name))

    return arrays.replace(
        **{name: pick(name, 1) for name in _ROW_STATE}, **{name: pick(name, 0) for name in _ROW_NUMBERS}
    )


def put_rows(arrays: CacheArrays, own: CacheArrays, first: Array) -> CacheArrays:
    """The cache after `own`, from `take_rows`, has moved on."""

    def put(name: str, axis: int):
        return jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, first, axis),
            getattr(arrays, name),
            getattr(own, name),
        )

    kept = {name: getattr(arrays, name) for name in _ROW_NUMBERS}
    return own.replace(**{name: put(name, 1) for name in _ROW_STATE}, **kept)


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
        numerics: name of the numerics whose stored form the arrays have.
        floor: int32 [B], lengths that `rewind` cannot pass: a prefix whose pages are shared ends there, or the
            decoder's windows begin there (see `ced`).
        tables, window_floors: int32 [B, P] and [2, B], what the arrays hold as page tables and as floors of encoder and
            decoder.
        mesh: where it was made; None: on one device. shards: devices among which its rows and pages are split.
    """

    arrays: CacheArrays | None
    lengths: np.ndarray
    written: np.ndarray
    history: np.ndarray | None
    max_len: int
    numerics: str
    floor: np.ndarray
    tables: np.ndarray
    window_floors: np.ndarray
    mesh: Mesh | None = None
    shards: int = 1

    @property
    def max_rewind(self) -> int:
        """How many tokens `rewind` can take back."""
        return MAX_REWIND

    def take(self) -> CacheArrays:
        """Hand the arrays over to a call that donates them.

        Raises:
            RuntimeError: they were handed over before.
        """
        arrays, self.arrays = self.peek(), None
        return arrays

    def pages(self, row: int) -> list[int]:
        """Ids of the pages that hold a row's tokens so far, in order, counted over the pages of all devices."""
        own = self.tables[row, : pages_for(int(self.lengths[row]))]
        return (own + self.device_of(row) * self.pages_of_device).tolist()

    def device_of(self, row: int) -> int:
        """Which of the `shards` devices holds a row."""
        return row // (len(self.peek().encoder_floor) // self.shards)

    @property
    def pages_of_device(self) -> int:
        """Pages in the pools of one device."""
        return jax.tree.leaves(self.peek().index_key)[0].shape[1] // self.shards

    def peek(self) -> CacheArrays:
        """The arrays for a call that only reads them; RuntimeError when they were donated before."""
        if self.arrays is None:
            raise RuntimeError("this cache was donated to an earlier call: continue with the cache that call returned")
        return self.arrays

    def rewind(self, lengths: np.ndarray) -> "Cache":
        """Forget everything past `lengths` [B].

        Raises:
            ValueError: a length is negative, larger than the present one, more than `max_rewind` tokens back, before
                the first token that the decoder's windows hold, or inside a prefix whose pages are shared: what came
                next would be written into them.
        """
        lengths = np.asarray(lengths, np.int32)
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"rewind needs one length for each of {self.lengths.shape[0]} rows, got shape {lengths.shape}"
            )
        oldest = np.maximum(self.written - MAX_REWIND, self.floor)
        if (lengths > self.lengths).any() or (lengths < oldest).any():
            raise ValueError(
                f"cannot rewind from {self.lengths.tolist()} to {lengths.tolist()}: rows can go back to "
                f"{oldest.tolist()} ({MAX_REWIND} tokens before the furthest one written, not into a prefix that is "
                "shared, and not before the decoder's windows) and not forward"
            )
        history = self.history
        if history is not None:
            column = np.arange(history.shape[1]) - (self.lengths - lengths)[:, None]
            history = np.where(column >= 0, np.take_along_axis(history, np.maximum(column, 0), axis=1), -1)
        return dataclasses.replace(self, arrays=self.take(), lengths=lengths, history=history)
