"""The public model: prefill, decode, draft, loss, and text in and out."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from dsv41_jax import ced, chat, next_token_loss, text_calls
from dsv41_jax.arguments import (
    check_cache,
    check_ids,
    check_lengths,
    check_max_len,
    check_prompt_length,
    check_segments,
)
from dsv41_jax.cache import Cache
from dsv41_jax.checkpoint.names import by_released_name, name_map
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import segment_starts
from dsv41_jax.engram_prefetch import EngramStats
from dsv41_jax.image_input import ImageInput, check_images
from dsv41_jax.layer_map import LayerShare, layer_map
from dsv41_jax.runner import Runner, block_bucket, cache_bucket
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.tokenizer import Tokenizer

DECODE_ROOM = 128


class Model:
    """A loaded model. Made by `dsv41_jax.load`; every call is a pure function of parameters, inputs and cache.

    Attributes:
        config: the `ModelConfig`. layer_map: the layer-share map, backbone then draft blocks. params: the parameter
            pytree.
        tokenizer: the folder's tokenizer, or None.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None):
        self._runner = runner
        self.tokenizer = tokenizer

    @property
    def config(self) -> ModelConfig:
        """The facts of the model: frozen, hashable."""
        return self._runner.config

    @property
    def layer_map(self) -> tuple[LayerShare, ...]:
        """Which layer reads whose main KV, index keys and selection: one entry a layer, backbone then draft blocks."""
        return layer_map(self.config)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as a nested dict of arrays, in their storage formats."""
        return self._runner.params

    @property
    def numerics(self) -> str:
        """Name of the numerics in use."""
        return self._runner.numerics.name

    @property
    def implementation(self) -> str:
        """Who computes what has kernels: "reference", "tpu", "gpu" or "interpret"."""
        return self._runner.numerics.implementation

    def prefill(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray | None = None,
        mode: str = "exact",
        images: Sequence[Sequence[ImageInput]] | None = None,
        max_len: int | None = None,
        all_logits: bool = False,
    ) -> tuple[Array, Cache]:
        """Read prompts into a new cache.

        Args:
            token_ids: int32 [B, T], image spans already expanded; padded on the right where rows are ragged.
            lengths: int32 [B] real lengths (at least 1); None where every row is full.
            mode: "exact" runs all layers on all tokens. "ced" runs the decoder on the last W tokens only, W the sliding
                window: half the work, and what the released model was trained for.
            images: for each row the images of its prompt, in any order.
            max_len: tokens a row of the cache can hold; default: a power of two with room for at least 128 more, or
                max_position_embeddings where that is less.
            all_logits: logits of every token.

        Returns:
            logits float32 [B, V] at each row's last token, or [B, T, V] (NaN where there are none: past a row's length
            and, in "ced" mode, before its last W tokens); and the cache.

        Raises:
            ValueError: anything about the arguments, before any computation; image_token_id outside of the images is
                one such. TypeError: images that are no `ImageInput`.
        """
        ced.check_mode(mode, self.config)
        ids = check_ids(self.config, token_ids, 2)
        check_prompt_length(self.config, ids.shape[1])
        lengths = check_lengths(lengths, len(ids), ids.shape[1])
        if max_len is None:
            max_len = min(cache_bucket(ids.shape[1] + DECODE_ROOM), self.config.max_position_embeddings)
        max_len = check_max_len(self.config, max_len, ids.shape[1])
        checked = check_images(images, ids, lengths, self.config)
        return ced.prefill(self._runner, ids, lengths, checked, max_len, mode, all_logits)

    def resume(
        self,
        cache: Cache,
        row: int,
        prefix_pages: Sequence[int],
        hit: int,
        token_ids: np.ndarray,
        images: Sequence[ImageInput] = (),
        own_pages: Sequence[int] | None = None,
        all_logits: bool = False,
    ) -> tuple[Array, Cache]:
        """Start a row of the cache anew with a prompt whose first `hit` tokens are in pages already; see `ced.resume`.

        Example: row 1 continues what row 0 has read: `resume(cache, 1, cache.pages(0)[: -(-hit // 128)], hit, ids)`.
        On a mesh rows are split in order; a prefix can be adopted from rows of the same device (`Cache.device_of`).
        """
        ids = check_ids(self.config, token_ids, 1)
        check_cache(self.config, self._runner.numerics, self._runner.mesh, cache, len(cache.lengths))
        [checked] = check_images([images], ids[None], np.array([len(ids)]), self.config)
        return ced.resume(self._runner, cache, row, prefix_pages, hit, ids, checked, own_pages, all_logits)

    @property
    def engram_stats(self) -> dict[int, EngramStats]:
        """By Engram layer whose table is off the device: rows asked for, hit rate, lookups a second, bytes read and
        kept.
        """
        return {layer: table.stats for layer, table in self._runner.tables.items()}

    def decode(self, cache: Cache, token_ids: np.ndarray) -> tuple[Array, Cache]:
        """Feed the next token, or the next few, of every row.

        Args:
            cache: it is donated: use the returned one from here on.
            token_ids: int32 [B] or [B, t].

        Returns:
            logits float32 [B, V] or [B, t, V], and the cache.

        Raises:
            ValueError: bad ids or shape, a cache of another model, numerics or mesh, or more tokens than it holds.
                RuntimeError: a spent cache.
        """
        ids = check_ids(self.config, token_ids, (1, 2))
        several = ids.ndim == 2
        ids = ids if several else ids[:, None]
        check_cache(self.config, self._runner.numerics, self._runner.mesh, cache, len(ids))
        t = ids.shape[1]
        padded = np.pad(ids, ((0, 0), (0, block_bucket(t) - t)), constant_values=self.config.pad_token_id)
        n_valid = np.full(len(ids), t, np.int32)
        logits, cache = self._runner.extend(cache, padded, n_valid, all_logits=several)
        if padded.shape != ids.shape:  # cut on the host: a slice on the device would be compiled for every t
            logits = jax.device_put(np.asarray(logits)[:, :t])
        return logits, cache

    def draft(
        self, cache: Cache, token_ids: np.ndarray, temperature: float = 0, key: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """DSpark proposals after the tokens in the cache and one more that is not in it yet.

        Args:
            cache: only read. token_ids: int32 [B], the next token of each row.
            temperature: 0 drafts the likeliest tokens; above 0 a key is needed, or a key for each row [B].

        Returns:
            tokens int32 [B, block + 1] (the given one first), logits float32 [B, block, V], raw confidence float32 [B,
            block].

        Raises:
            ValueError: no draft blocks, nothing in the cache, a cache of another model or numerics, bad ids, or a
                temperature without a key.
        """
        if not self.config.n_draft:
            raise ValueError("this model has no draft blocks (num_nextn_predict_layers is 0)")
        ids = check_ids(self.config, token_ids, 1)
        check_cache(self.config, self._runner.numerics, self._runner.mesh, cache, len(ids))
        if (cache.lengths < 1).any():
            raise ValueError(f"a draft needs at least one token in each row of the cache: {cache.lengths.tolist()}")
        temperature = SamplingOptions(temperature=temperature).temperature
        if key is not None and not isinstance(key, Array):
            raise TypeError(f"key={key!r}: a PRNG key is needed, see jax.random.key")
        if temperature > 0 and key is None:
            raise ValueError(f"temperature={temperature}: drafting at a temperature above 0 needs a PRNG key")
        return self._runner.draft(cache, ids, temperature, jax.random.key(0) if key is None else key)

    def loss(self, token_ids: np.ndarray, segment_ids: np.ndarray | None = None) -> Array:
        """Mean next-token cross-entropy in nats of the cacheless forward.

        Args:
            token_ids: int32 [B, T]. segment_ids: int32 [B, T]; stretches of equal ids are samples of their own, without
                targets across their borders. None: every row is one sample.

        Raises:
            ValueError: bad ids or segments, fewer than two tokens, or more than max_position_embeddings.
        """
        value = next_token_loss.loss(*self._loss_arguments(token_ids, segment_ids), **self._static())
        return self._runner.local(value)

    def loss_and_grads(
        self, token_ids: np.ndarray, segment_ids: np.ndarray | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """`loss` and its gradient by released tensor name, of the dequantised [out, in] matrices.

        Raises:
            ValueError: in numerics other than "float32": stored formats have no gradient.
        """
        if self.numerics != "float32":
            raise ValueError(f'gradients need numerics="float32", this model was loaded with {self.numerics!r}')
        if self._runner.tables:
            raise ValueError('gradients need engram="device": tables in host memory or in the file are not parameters')
        value, grads = next_token_loss.loss_and_grads(*self._loss_arguments(token_ids, segment_ids), **self._static())
        grads = by_released_name(grads, self.config)
        rows = {name: spec.shape[0] for name, spec in name_map(self.config).specs.items()}
        grads = {name: grad[: rows[name]] if grad.shape[0] > rows[name] else grad for name, grad in grads.items()}
        return self._runner.local(value), grads  # without the padding of a mesh

    generate = text_calls.generate
    stream = text_calls.stream
    chat = chat.chat

    def require_tokenizer(self) -> Tokenizer:
        """The folder's tokenizer; ValueError where it has none."""
        if self.tokenizer is None:
            raise ValueError(
                "this model's folder has no tokenizer.json: text calls need one, token calls (prefill, decode) do not"
            )
        return self.tokenizer

    def _static(self) -> dict[str, Any]:
        return {"config": self.config, "numerics": self._runner.numerics, "mesh": self._runner.mesh}

    def _loss_arguments(self, token_ids: np.ndarray, segment_ids: np.ndarray | None) -> tuple:
        ids = check_ids(self.config, token_ids, 2)
        if ids.shape[1] < 2:
            raise ValueError(f"token_ids has rows of {ids.shape[1]} tokens: a loss needs at least 2")
        check_prompt_length(self.config, ids.shape[1])
        starts = None
        if segment_ids is not None:
            segment_ids = check_segments(segment_ids, ids.shape)
            starts = segment_starts(segment_ids)
            if starts[:, 1:].all():
                raise ValueError("segment_ids leave no sample of two tokens: there is nothing to predict")
        memory = {}
        if self._runner.hasher is not None:
            memory = self._runner.engram_input(self._runner.hasher(ids, starts=starts)[0])
        runner, rows = self._runner, self._runner.padded_rows(len(ids))
        if rows > len(ids):  # rows that fill up: every token a sample of its own, which has nothing to predict
            segment_ids = np.zeros(ids.shape, np.int32) if segment_ids is None else segment_ids
            filling = np.broadcast_to(np.arange(ids.shape[1]), (rows - len(ids), ids.shape[1]))
            segment_ids = np.concatenate([segment_ids, filling])
        segments = None if segment_ids is None else runner.put(np.asarray(segment_ids, np.int32), rows)
        return self.params, runner.put(ids, rows), memory, segments
