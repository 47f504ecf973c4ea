"""Embeddings of a training batch's images: differentiable, and of static shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.config import ModelConfig
from dsv41_jax.image_plan import TokenType, vision_config
from dsv41_jax.numerics import Numerics
from dsv41_jax.vision import SPAN_PARAMS, ImageSpan, SpanTables


def image_embeds(
    config: ModelConfig, numerics: Numerics, params: dict, images: dict, batch_shape: tuple[int, int]
) -> Array:
    """The tower and aligner on the images of a batch, each span at its place.

    Images are computed one after another, and again in the backward pass: the memory is that of one image. Empty slots
    cost nothing. Gradients go to `params`.

    Args:
        config: of the model. numerics: as in the model.
        params: the model's parameters (vision, aligner and the three delimiter vectors are read).
        images: as `row_images` makes them, [B, M, ...].
        batch_shape: (B, T).

    Returns:
        [B, T, D] in the activation dtype, zero outside of the spans.
    """
    used = {name: params[name] for name in SPAN_PARAMS}
    span = ImageSpan(vision_config(config), config.hidden_size, numerics)

    @jax.checkpoint
    def embed(used: dict, patches: Array, tables: SpanTables) -> Array:
        return span.apply({"params": used}, patches.astype(numerics.dtype), tables)

    def one(image: dict) -> Array:
        tables = SpanTables(*(image[name] for name in ("cos", "sin", "patch_count", "slot_patches", "slot_types")))
        shape = jax.eval_shape(embed, used, image["patches"], tables)
        return jax.lax.cond(
            image["patch_count"] > 0,
            lambda: embed(used, image["patches"], tables),
            lambda: jnp.zeros(shape.shape, shape.dtype),
        )

    rows, per_row = images["start"].shape
    flat = jax.tree.map(lambda x: jnp.reshape(x, (rows * per_row, *x.shape[2:])), images)
    spans = jax.lax.map(one, flat)  # [B * M, S, D]
    slot = jnp.arange(spans.shape[1])
    length = batch_shape[1]
    at = jnp.where(flat["slot_types"] == TokenType.TEXT, length, flat["start"][:, None] + slot)
    row = jnp.repeat(jnp.arange(rows), per_row)[:, None]
    return jnp.zeros((*batch_shape, spans.shape[-1]), spans.dtype).at[row, at].set(spans, mode="drop")
