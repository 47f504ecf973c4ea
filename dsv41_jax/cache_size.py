"""Bytes of a cache, from its abstract arrays: what it takes in HBM, what of it outlives a sequence, what fits."""

import dataclasses
import math
from typing import Any

import jax

from dsv41_jax.cache import abstract_arrays, global_bytes_per_token, window_bytes
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import RELEASED, Numerics
from dsv41_jax.pages import PAGE_TOKENS

_NUMBER_BYTES = 4  # of a page id, and of a floor
_FLOORS = 2


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache.

    Attributes:
        pages: main KV and index keys, which can be kept and shared: the persistent part.
        windows: rings and compressor tails of the sequences. tables: page tables and floors.
    """

    pages: int
    windows: int
    tables: int

    @property
    def hbm(self) -> int:
        """On devices, while the sequences run."""
        return self.pages + self.windows + self.tables


def cache_bytes(config: ModelConfig, batch: int, context: int, numerics: Numerics = RELEASED) -> CacheBytes:
    """Bytes of a cache of `batch` sequences of at most `context` tokens, in whole pages of 128 tokens; over all devices
    that share it, and without what a device pads its layouts with.
    """
    arrays = abstract_arrays(config, numerics, batch, context)
    return CacheBytes(
        pages=_nbytes((arrays.main_kv, arrays.index_key)),
        windows=_nbytes((arrays.window, arrays.draft_window, arrays.tail_values, arrays.tail_gates)),
        tables=_nbytes((arrays.page_table, arrays.encoder_floor, arrays.decoder_floor)),
    )


def tokens_that_fit(config: ModelConfig, nbytes: int, batch: int, numerics: Numerics = RELEASED) -> int:
    """Tokens, of all sequences together and in whole pages, whose cache fits in so many bytes beside the windows of
    `batch` sequences; 0 if not even these fit.
    """
    left = nbytes - batch * (window_bytes(config, numerics) + _FLOORS * _NUMBER_BYTES)
    page = PAGE_TOKENS * global_bytes_per_token(config, numerics) + _NUMBER_BYTES
    return max(0, math.floor(left / page)) * PAGE_TOKENS


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
