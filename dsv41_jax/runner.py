"""Runs blocks of tokens through the jitted step: buckets, Engram input, and the host's part of the cache.

Blocks have few static lengths, so few programs are compiled; `compilations()` counts them.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax import dspark, model
from dsv41_jax.blocks import Params
from dsv41_jax.cache import MAX_REWIND, Cache, CacheArrays, zero_arrays
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import DEAD, EngramHasher
from dsv41_jax.engram_tables import EngramTable
from dsv41_jax.image_input import ImageInput, prompt_token_types
from dsv41_jax.image_plan import TokenType
from dsv41_jax.numerics import Numerics
from dsv41_jax.vision import merge_images

_SMALLEST_BLOCK = 16
_SMALLEST_CACHE = 256

_compiled = 0


def compilations() -> int:
    """Number of model programs compiled by this process so far (steps, drafts, losses), one per distinct shape and
    setting.
    """
    return _compiled


def counted(function: Callable) -> Callable:
    """Count each tracing of a function that is about to be jitted."""

    @functools.wraps(function)
    def traced(*args, **kwargs):
        global _compiled
        _compiled += 1
        return function(*args, **kwargs)

    return traced


@functools.partial(jax.jit, static_argnames=("config", "numerics", "all_logits"), donate_argnames=("arrays",))
@counted
def _extend(
    params: Params,
    arrays: CacheArrays,
    token_ids: Array,
    start: Array,
    n_valid: Array,
    memory: dict[str, Array],
    image_mask: Array | None,
    image_embeds: Array | None,
    *,
    config: ModelConfig,
    numerics: Numerics,
    all_logits: bool,
) -> tuple[Array, CacheArrays]:
    step = functools.partial(model.extend, config, numerics, params, all_logits=all_logits)
    if token_ids.shape[0] == 1 or token_ids.shape[1] == 1:
        return step(arrays, token_ids, start, n_valid, memory, image_mask, image_embeds)

    # Blocks of several tokens run row by row: a large matrix product may sum in an order that depends on how many rows
    # it has, and a prompt's numbers must not depend on its neighbours. Each row's work is the same either way.
    def one_row(row: tuple) -> tuple[Array, CacheArrays]:
        own, *inputs = jax.tree.map(lambda a: a[None], row)
        logits, own = step(jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), own), *inputs)
        return logits[0], jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0)[0], own)

    rows_first = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), arrays)
    inputs = (rows_first, token_ids, start, n_valid, memory, image_mask, image_embeds)
    logits, rows_first = jax.lax.map(one_row, inputs)
    return logits, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), rows_first)


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
@counted
def _draft(
    params: Params,
    arrays: CacheArrays,
    anchor: Array,
    start: Array,
    temperature: Array,
    key: Array,
    *,
    config,
    numerics,
):
    return dspark.draft(config, numerics, params, arrays, anchor, start, temperature, key)


def block_bucket(tokens: int) -> int:
    """Static length of a block of `tokens` tokens: 1, or a power of two from 16 on."""
    return 1 if tokens == 1 else max(_SMALLEST_BLOCK, 1 << (tokens - 1).bit_length())


def cache_bucket(tokens: int) -> int:
    """Static cache length that holds `tokens`: a power of two from 256 on."""
    return max(_SMALLEST_CACHE, 1 << (tokens - 1).bit_length())


class Runner:
    """A model's parameters with everything a step needs from the host.

    Attributes:
        hasher: Engram hash of the token map, or None without Engram layers.
        tables: {layer: table} for Engram tables off the device; layers not in it have theirs in `params`.
        prefill_block: tokens of a row that one prefill step takes. It is the same for every prompt: another length may
            round differently, and a prompt's numbers must not depend on how long its neighbours are.
    """

    prefill_block: int = 64

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        params: Params,
        hasher: EngramHasher | None,
        tables: Mapping[int, EngramTable],
    ):
        self.config, self.numerics, self.params = config, numerics, params
        self.hasher, self.tables = hasher, dict(tables)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache for `batch` rows of at most `max_len` tokens."""
        history = None
        if self.hasher is not None:
            history = np.full((batch, self.hasher.lookback + MAX_REWIND), DEAD, np.int64)
        zero = np.zeros(batch, np.int32)
        return Cache(zero_arrays(self.config, self.numerics, batch, max_len), zero, zero, history, max_len)

    def extend(
        self,
        cache: Cache,
        token_ids: np.ndarray,
        n_valid: np.ndarray,
        image_mask: np.ndarray | None = None,
        image_embeds: Array | None = None,
        all_logits: bool = False,
    ) -> tuple[Array, Cache]:
        """One step: token_ids [B, t] of which n_valid [B] count; the cache is spent. Logits [B, V] or [B, t, V]."""
        t = token_ids.shape[1]
        end = cache.lengths + n_valid
        if (end > cache.max_len).any():
            raise ValueError(
                f"{int(end.max())} tokens do not fit the cache: it holds max_len={cache.max_len} a row "
                "(see prefill's max_len)"
            )
        memory, history = self._memory(cache, token_ids, n_valid, image_mask)
        logits, arrays = _extend(
            self.params,
            cache.take(),
            jnp.asarray(token_ids, jnp.int32),
            jnp.asarray(cache.lengths),
            jnp.asarray(n_valid, jnp.int32),
            memory,
            None if image_mask is None else jnp.asarray(image_mask),
            image_embeds,
            config=self.config,
            numerics=self.numerics,
            all_logits=all_logits or t == 1,  # the same thing for one token: one program less
        )
        if t == 1 and not all_logits:
            logits = logits[:, 0]
        end = end.astype(np.int32)
        return logits, Cache(arrays, end, np.maximum(cache.written, end), history, cache.max_len)

    def _memory(self, cache: Cache, token_ids: np.ndarray, n_valid: np.ndarray, image_mask: np.ndarray | None):
        """Engram input of a block, and the id history after it."""
        if self.hasher is None:
            return {}, None
        compressed = self.hasher.compress(token_ids, image_mask)
        rows = self.hasher.hash(compressed, cache.history[:, -self.hasher.lookback :])
        joined = np.concatenate([cache.history, compressed], axis=1)
        keep = n_valid[:, None] + np.arange(cache.history.shape[1])
        return self.engram_input(rows), np.take_along_axis(joined, keep, axis=1)

    def engram_input(self, rows: np.ndarray) -> dict[str, Array]:
        """Row numbers [layers, B, t, columns] -> the step's input: numbers for tables on the device, rows for the
        others.
        """
        memory = {}
        for i, layer in enumerate(self.hasher.layer_ids):
            value = self.tables[layer].rows(rows[i]) if layer in self.tables else rows[i]
            memory[f"l{layer}"] = jnp.asarray(value)
        return memory

    def prefill(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        images: list[list[ImageInput]],
        max_len: int,
        all_logits: bool,
    ) -> tuple[Array, Cache]:
        """Exact prefill in blocks: all layers on all tokens.

        Returns:
            logits at each row's last token [B, V], or of every token [B, T, V] (rows past a length hold no meaning).
        """
        batch, longest = token_ids.shape
        cache = self.new_cache(batch, max_len)
        mask = embeds = None
        if any(images):
            mask = prompt_token_types(images, longest, self.config) != TokenType.TEXT
            zeros = jnp.zeros((batch, longest, self.config.hidden_size), self.numerics.dtype)
            embeds = merge_images(self.params, zeros, images, self.config, self.numerics)
        pieces, last = [], None
        for at in range(0, longest, self.prefill_block):
            n = min(self.prefill_block, longest - at)
            t = self.prefill_block
            pad = ((0, 0), (0, t - n))
            block = np.pad(token_ids[:, at : at + n], pad, constant_values=self.config.pad_token_id)
            n_valid = np.clip(lengths - at, 0, n).astype(np.int32)
            logits, cache = self.extend(
                cache,
                block,
                n_valid,
                None if mask is None else np.pad(mask[:, at : at + n], pad),
                None if embeds is None else jnp.pad(embeds[:, at : at + n], (*pad, (0, 0))),
                all_logits,
            )
            if all_logits:
                pieces.append(logits[:, :n])
            else:
                here = jnp.asarray(n_valid > 0)[:, None]
                last = logits if last is None else jnp.where(here, logits, last)
        return (jnp.concatenate(pieces, axis=1) if all_logits else last), cache

    def draft(self, cache: Cache, anchor: np.ndarray, temperature: float, key: Array) -> tuple[Array, Array, Array]:
        """One draft round; the cache is only read. See `dspark.draft`."""
        return _draft(
            self.params,
            cache.peek(),
            jnp.asarray(anchor, jnp.int32),
            jnp.asarray(cache.lengths),
            jnp.float32(temperature),
            key,
            config=self.config,
            numerics=self.numerics,
        )
