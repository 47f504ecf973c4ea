"""What a cache holds, read back by position: entries of a source, and everything that belongs to a row."""

import jax
import numpy as np

from dsv41_jax.cache import CacheArrays
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
from dsv41_jax.pages import PageLayout


def stored_entries(
    config: ModelConfig, numerics: Numerics, arrays: CacheArrays, ratio: int, slot: int, row: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Main KV [N, d] and index keys [N, di] of a source, as values, through the row's page table."""
    layout, table = PageLayout.of(config, numerics, ratio), np.asarray(arrays.page_table)[row]
    page, place = (x.ravel() for x in np.meshgrid(table, np.arange(layout.entries), indexing="ij"))
    main_kv = layout.read_main(arrays.main_kv[f"r{ratio}"], slot, page, place)
    index_key = layout.read_index(arrays.index_key[f"r{ratio}"], slot, table[None])[0]
    return np.asarray(main_kv), np.asarray(index_key)


def rows_of(arrays: CacheArrays) -> list[np.ndarray]:
    """Copies of all arrays with the row axis first; plain pools (not packed) of rows that own consecutive pages."""
    batch = len(arrays.page_table)
    state = (arrays.window, arrays.draft_window, arrays.tail_values, arrays.tail_gates)
    found = [np.moveaxis(np.array(leaf), 1, 0) for leaf in jax.tree.leaves(state)]
    for pool in jax.tree.leaves((arrays.main_kv, arrays.index_key)):
        pool = np.array(pool)
        found.append(np.moveaxis(pool.reshape(pool.shape[0], batch, -1, *pool.shape[2:]), 1, 0))
    numbers = (arrays.page_table, arrays.encoder_floor, arrays.decoder_floor)
    return found + [np.array(leaf) for leaf in numbers]
