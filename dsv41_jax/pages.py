"""Pages of the global cache: how main KV and index keys of 128 tokens are stored, written and read.

A page id stands for 128 tokens and indexes a pool for each KV source: 128 // ratio entries of each kind. Stored forms,
with S sources of one ratio and P pages:

    main KV     packed: words int32 [S, P * rows, 128]. Entry e of a page is `words` consecutive words from word
                        e * words on: E2M1 codes (nibble k of word w is channel k * d/8 + w), then E4M3 scales, one per
                        16 channels (byte b of word w is scale b * scale_words + w). Released: 72 words, 288 bytes.
                plain:  rows [S, P, entries, d] in the activation dtype.
    index keys  packed: codes int32 [S, P, rows, 128], channel-major: word w of all keys of the page, then word w + 1;
                        scales int32 [S, rows, 128], the UE8M0 bytes of a page's keys side by side. Released: 68 bytes.
                plain:  rows [S, P, entries, di].

Unpacking is exact: a code times its scale fits bf16. Positions inside a pool are pairs (page or row, place), so that no
index passes 2^31 before the pool holds a terabyte.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import quant
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
from pallas_kernels.kv_write.reference import LANES, bytes_to_words, main_words, nibbles_to_words, scale_place

PAGE_TOKENS = 128

Pool = dict[str, Array]


def _words_to_values(words: Array) -> Array:
    """int32 [..., n] -> E2M1 values float32 [..., 8 * n]."""
    shift = 4 * jnp.arange(8, dtype=jnp.uint32)[:, None]
    planes = (jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None, :] >> shift) & 15
    return quant.e2m1_values(planes.reshape(*words.shape[:-1], 8 * words.shape[-1]))


def _words_to_bytes(words: Array, n: int) -> Array:
    """int32 [..., ceil(n/4)] -> uint8 [..., n]."""
    shift = 8 * jnp.arange(4, dtype=jnp.uint32)[:, None]
    raw = (jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None, :] >> shift) & 0xFF
    return raw.reshape(*words.shape[:-1], 4 * words.shape[-1])[..., :n].astype(jnp.uint8)


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Sizes inside a page of the sources of one ratio.

    Attributes:
        ratio: tokens of an entry. head_dim, index_dim: channels of main KV and of an index key.
        packed: FP4 words (numerics that quantise) or plain rows.
        dtype: of the values read, and of plain rows.
    """

    ratio: int
    head_dim: int
    index_dim: int
    packed: bool
    dtype: jnp.dtype

    @classmethod
    def of(cls, config: ModelConfig, numerics: Numerics, ratio: int) -> "PageLayout":
        """The layout for a model."""
        return cls(ratio, config.head_dim, config.index_head_dim, numerics.quantize_activations, numerics.dtype)

    @property
    def entries(self) -> int:
        """Entries of a page."""
        return PAGE_TOKENS // self.ratio

    @property
    def main_words(self) -> int:
        """int32 words of a main KV entry."""
        return main_words(self.head_dim)

    @property
    def main_rows(self) -> int:
        """Rows of 128 words of a page's main KV."""
        return -(-self.entries * self.main_words // LANES)

    @property
    def index_rows(self) -> int:
        """Rows of 128 words of the codes of a page's index keys."""
        return -(-self.entries * (self.index_dim // 8) // LANES)

    @property
    def index_scale_words(self) -> int:
        """Words of the scales of a page's index keys."""
        return self.entries * -(-self.index_dim // (4 * quant.BLOCK))

    def abstract_main(self, sources: int, pages: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the main KV pool."""
        if not self.packed:
            return {"rows": jax.ShapeDtypeStruct((sources, pages, self.entries, self.head_dim), self.dtype)}
        return {"words": jax.ShapeDtypeStruct((sources, pages * self.main_rows, LANES), jnp.int32)}

    def abstract_index(self, sources: int, pages: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the index key pool."""
        if not self.packed:
            return {"rows": jax.ShapeDtypeStruct((sources, pages, self.entries, self.index_dim), self.dtype)}
        scale_rows = -(-pages * self.index_scale_words // LANES)
        return {
            "codes": jax.ShapeDtypeStruct((sources, pages, self.index_rows, LANES), jnp.int32),
            "scales": jax.ShapeDtypeStruct((sources, scale_rows, LANES), jnp.int32),
        }

    def main_start(self, page: Array, place: Array) -> tuple[Array, Array]:
        """Row and lane [...] of the first word of the entries at (page, place) [...]."""
        word = place * self.main_words
        return page * self.main_rows + word // LANES, word % LANES

    def _main_place(self, page: Array, place: Array) -> tuple[Array, Array]:
        """Row and lane [..., words] of every word of the entries at (page, place) [...]."""
        word = place[..., None] * self.main_words + jnp.arange(self.main_words)
        return page[..., None] * self.main_rows + word // LANES, word % LANES

    def _scale_place(self, page: Array, place: Array) -> tuple[Array, Array]:
        """Row and lane [..., scale words of a key] in the index scales."""
        return scale_place(page, place, self.entries, self.index_scale_words // self.entries)

    def write_main(self, pool: Pool, slot: Array | int, page: Array, place: Array, values: Array, keep: Array) -> Pool:
        """Write entries of one source.

        Args:
            slot: the source. page, place: int32 [B, n], where each entry goes. values: [B, n, d], not quantised yet.
            keep: bool [B, n]; the others are not written.
        """
        if not self.packed:
            page = jnp.where(keep, page, pool["rows"].shape[1])
            return {"rows": pool["rows"].at[slot, page, place].set(values.astype(self.dtype), mode="drop")}
        codes, scales = quant.q4_main(values)
        words = jnp.concatenate([nibbles_to_words(codes), bytes_to_words(scales)], axis=-1)
        row, lane = self._main_place(page, place)
        row = jnp.where(keep[..., None], row, pool["words"].shape[1])
        return {"words": pool["words"].at[slot, row, lane].set(words, mode="drop")}

    def read_main(self, pool: Pool, slot: Array | int, page: Array, place: Array) -> Array:
        """Values [..., d] of the entries at (page, place) [...] of one source."""
        if not self.packed:
            return pool["rows"].at[slot, page, place].get(mode="promise_in_bounds")
        words = pool["words"].at[slot, *self._main_place(page, place)].get(mode="promise_in_bounds")
        split = self.head_dim // 8
        scales = _words_to_bytes(words[..., split:], self.head_dim // quant.MAIN_KV_BLOCK)
        scales = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
        values = _words_to_values(words[..., :split])
        return (values * jnp.repeat(scales, quant.MAIN_KV_BLOCK, axis=-1)).astype(self.dtype)

    def write_index(self, pool: Pool, slot: Array | int, page: Array, place: Array, keys: Array, keep: Array) -> Pool:
        """Write index keys [B, n, di] of one source; arguments as in `write_main`."""
        first = pool["rows" if "rows" in pool else "codes"]
        gone = jnp.where(keep, page, first.shape[1])
        if not self.packed:
            return {"rows": first.at[slot, gone, place].set(keys.astype(self.dtype), mode="drop")}
        codes, scales = quant.q4_index(keys)
        words = nibbles_to_words(codes)
        word = jnp.arange(words.shape[-1]) * self.entries + place[..., None]
        codes = first.at[slot, gone[..., None], word // LANES, word % LANES].set(words, mode="drop")
        row, lane = self._scale_place(page, place)
        row = jnp.where(keep[..., None], row, pool["scales"].shape[1])
        return {"codes": codes, "scales": pool["scales"].at[slot, row, lane].set(bytes_to_words(scales), mode="drop")}

    def read_index(self, pool: Pool, slot: Array | int, pages: Array) -> Array:
        """All index keys of pages int32 [B, n], in order: [B, n * entries, di]."""
        b, n = pages.shape
        if not self.packed:
            rows = pool["rows"].at[slot, pages].get(mode="promise_in_bounds")
            return rows.reshape(b, n * self.entries, self.index_dim)
        tiles = pool["codes"].at[slot, pages].get(mode="promise_in_bounds").reshape(b, n, self.index_rows * LANES)
        width = self.index_dim // 8
        words = tiles[..., : width * self.entries].reshape(b, n, width, self.entries).swapaxes(-1, -2)
        place = jnp.arange(self.entries)[None, None]
        page, place = jnp.broadcast_arrays(pages[..., None], place)
        scales = pool["scales"].at[slot, *self._scale_place(page, place)].get(mode="promise_in_bounds")
        scales = quant.e8m0_to_f32(_words_to_bytes(scales, self.index_dim // quant.BLOCK))
        keys = _words_to_values(words) * jnp.repeat(scales, quant.BLOCK, axis=-1)
        return keys.astype(self.dtype).reshape(b, n * self.entries, self.index_dim)

    def copy_page(self, main: Pool, index: Pool, source: Array, target: Array) -> tuple[Pool, Pool]:
        """Both pools with page `target` a copy of page `source` (int32 scalars), for all sources."""

        def rows(pool: Array, count: int) -> Array:
            part = jax.lax.dynamic_slice_in_dim(pool, source * count, count, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(pool, part, target * count, axis=1)

        if not self.packed:
            return {"rows": rows(main["rows"], 1)}, {"rows": rows(index["rows"], 1)}
        place = jnp.arange(self.entries)
        from_row, from_lane = self._scale_place(jnp.full_like(place, source), place)
        to_row, to_lane = self._scale_place(jnp.full_like(place, target), place)
        scales = index["scales"]
        scales = scales.at[:, to_row, to_lane].set(scales[:, from_row, from_lane])
        return {"words": rows(main["words"], self.main_rows)}, {"codes": rows(index["codes"], 1), "scales": scales}
