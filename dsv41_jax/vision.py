"""The vision transformer, the aligner, and the embeddings of an image's span of tokens.

Everything that depends on the grid (rotary tables, which patches a token groups, where the delimiters stand) is made on
the host and passed in as arrays, and patches are padded to a few bucket sizes: one compiled function a bucket serves
every grid. Shapes: n patches (padded), C vision hidden size, h heads, d head dim, R downsample ratio, S slots of a span
(padded), D hidden size.
"""

import functools

import einops
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.config import ModelConfig, VisionConfig
from dsv41_jax.image_input import ImageInput
from dsv41_jax.image_plan import Grid, TokenType, span_length, span_token_types, token_grid, vision_config
from dsv41_jax.linear import Linear
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics, einsum_f32
from dsv41_jax.rope import frequencies

NORM_EPS = 1e-6  # the text norms use another one
BUCKET_MULTIPLE = 64
SCORE_BYTES = 128 * 2**20  # bound on one tile of float32 attention scores
SPAN_PARAMS = ("vision", "aligner", "image_start", "image_newline", "image_end")


@flax.struct.dataclass
class SpanTables:
    """What the compiled function needs to know of a grid (host arrays).

    Attributes:
        cos, sin: float32 [n, d/2] rotary tables, zero on padding.
        patch_count: int32 [] real patches.
        slot_patches: int32 [S, R*R] patches that an IMAGE slot groups, in (dy, dx) order; n where the grid has none.
        slot_types: int32 [S] `TokenType`, TEXT on padding.
    """

    cos: Array
    sin: Array
    patch_count: Array
    slot_patches: Array
    slot_types: Array


def patch_bucket(count: int, config: VisionConfig) -> int:
    """The padded number of patches: halvings of the largest image, and three quarters of each.

    Raises:
        ValueError: more patches than `max_image_tokens` tokens can hold.
    """
    largest = config.max_image_tokens * config.downsample_ratio**2
    if count > largest:
        raise ValueError(f"{count} patches are more than the {largest} of the largest image")
    sizes = (largest * quarters // (4 << halving) for halving in range(largest.bit_length()) for quarters in (3, 4))
    best = min(size for size in sizes if size >= count)
    return -(-best // BUCKET_MULTIPLE) * BUCKET_MULTIPLE


def rotary_tables(grid: Grid, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [rows * columns, head_dim/2]: one half turns with the row, the other with the column."""
    inverse_frequencies = frequencies(head_dim // 2, theta)
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    angle = np.concatenate([p[:, None].astype(np.float32) * inverse_frequencies for p in (row, column)], axis=1)
    return np.cos(angle.astype(np.float64)).astype(np.float32), np.sin(angle.astype(np.float64)).astype(np.float32)


def span_tables(grid: Grid, config: VisionConfig) -> SpanTables:
    """Host arrays for a grid, padded to its patch bucket and to `max_image_tokens` slots."""
    rows, columns = grid
    ratio, count = config.downsample_ratio, rows * columns
    bucket = patch_bucket(count, config)
    pad = ((0, bucket - count), (0, 0))
    cos, sin = rotary_tables(grid, config.hidden_size // config.num_attention_heads, config.rope_theta)

    token_rows, token_columns = token_grid(grid, config)
    cells = np.full((token_rows * ratio, token_columns * ratio), bucket, np.int32)
    cells[:rows, :columns] = np.arange(count).reshape(grid)
    types = np.full(config.max_image_tokens, TokenType.TEXT, np.int32)
    types[: span_length(grid, config)] = span_token_types(grid, config)
    slot_patches = np.full((config.max_image_tokens, ratio**2), bucket, np.int32)
    cells = einops.rearrange(cells, "(r dy) (c dx) -> (r c) (dy dx)", dy=ratio, dx=ratio)
    slot_patches[types == TokenType.IMAGE] = cells
    return SpanTables(np.pad(cos, pad), np.pad(sin, pad), np.int32(count), slot_patches, types)


class Affine(nn.Module):
    """x W^T + b: [..., in] -> [..., features]; the bias is added before the one rounding."""

    features: int
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return self.numerics.round(einsum_f32("...k,nk->...n", x, weight) + bias.astype(jnp.float32))


def rotate_halves(x: Array, cos: Array, sin: Array, numerics: Numerics) -> Array:
    """Rotate channel i of x [n, h, d] with channel i + d/2 by the tables [n, d/2]; one rounding."""
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = [real * cos - imaginary * sin, imaginary * cos + real * sin]
    return numerics.round(jnp.concatenate(rotated, axis=-1))


def bidirectional_attention(q: Array, k: Array, v: Array, valid: Array, numerics: Numerics) -> Array:
    """Full attention of q, k, v [n, h, d] over the keys where valid [n]; float32 probabilities, one rounding.

    Queries go tile by tile so that the scores of a large image stay within SCORE_BYTES.
    """
    n, heads, head_dim = q.shape
    tiles = next(t for t in range(1, n + 1) if n % t == 0 and (4 * heads * n * n // t <= SCORE_BYTES or n // t <= 2))

    def attend(q_tile: Array) -> Array:
        scores = einsum_f32("qhd,khd->hqk", q_tile, k) * jnp.float32(head_dim**-0.5)
        probabilities = jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
        return numerics.round(einsum_f32("hqk,khd->qhd", probabilities, v))

    out = jax.lax.map(attend, einops.rearrange(q, "(t q) h d -> t q h d", t=tiles))
    return einops.rearrange(out, "t q h d -> (t q) h d")


class VisionAttention(nn.Module):
    """Multi-head attention over patches, x [n, C] -> [n, C]. wqkv rows are [q | k | v]."""

    config: VisionConfig
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array, cos: Array, sin: Array, valid: Array) -> Array:
        size, heads = self.config.hidden_size, self.config.num_attention_heads
        qkv = Affine(3 * size, self.numerics, name="wqkv")(x)
        q, k, v = einops.rearrange(qkv, "n (three h d) -> three n h d", three=3, h=heads)
        q, k = (rotate_halves(y, cos, sin, self.numerics) for y in (q, k))
        out = bidirectional_attention(q, k, v, valid, self.numerics)
        return Affine(size, self.numerics, name="wo")(einops.rearrange(out, "n h d -> n (h d)"))


class VisionMlp(nn.Module):
    """SwiGLU without biases or clamps, x [n, C] -> [n, C]. w1 rows are [gate | up]; silu is rounded by itself."""

    config: VisionConfig
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden = Linear(2 * self.config.intermediate_size, self.numerics, quantized=False, name="w1")(x)
        gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
        activated = self.numerics.round(self.numerics.round_f32(jax.nn.silu(gate)) * up)
        return Linear(self.config.hidden_size, self.numerics, quantized=False, name="w2")(activated)


class VisionBlock(nn.Module):
    """Pre-norm block in the form nn.scan wants: (x [n, C], ...) -> (x [n, C], None)."""

    config: VisionConfig
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array, cos: Array, sin: Array, valid: Array) -> tuple[Array, None]:
        attention = VisionAttention(self.config, self.numerics, name="attn")
        x = self._add(x, attention(RMSNorm(NORM_EPS, self.numerics, name="norm1")(x), cos, sin, valid))
        mlp = VisionMlp(self.config, self.numerics, name="mlp")
        return self._add(x, mlp(RMSNorm(NORM_EPS, self.numerics, name="norm2")(x))), None

    def _add(self, x: Array, y: Array) -> Array:
        return self.numerics.round(x.astype(jnp.float32) + y.astype(jnp.float32))


class PatchEmbed(nn.Module):
    """patches [n, 3, p, p] -> [n, C]."""

    config: VisionConfig
    numerics: Numerics

    @nn.compact
    def __call__(self, patches: Array) -> Array:
        flat = einops.rearrange(patches.astype(self.numerics.dtype), "n rgb y x -> n (rgb y x)")
        return Affine(self.config.hidden_size, self.numerics, name="proj")(flat)


class VisionTransformer(nn.Module):
    """The ViT on the subtree `vision`: patches [n, 3, p, p] -> [n, C]. Block weights are stacked and scanned."""

    config: VisionConfig
    numerics: Numerics

    @nn.compact
    def __call__(self, patches: Array, cos: Array, sin: Array, valid: Array) -> Array:
        x = PatchEmbed(self.config, self.numerics, name="patch_embed")(patches)
        blocks = nn.scan(
            VisionBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.config.num_hidden_layers,
        )
        x, _ = blocks(self.config, self.numerics, name="blocks")(x, cos, sin, valid)
        return RMSNorm(NORM_EPS, self.numerics, name="norm")(x)


class Aligner(nn.Module):
    """Groups of R x R patches to tokens, on the subtree `aligner`: x [n, C], slot_patches [S, R*R] -> [S, D]."""

    hidden_size: int
    numerics: Numerics

    @nn.compact
    def __call__(self, x: Array, slot_patches: Array) -> Array:
        x = jnp.concatenate([x, jnp.zeros_like(x[:1])])  # row n: cells that stick out of the grid are zero
        grouped = einops.rearrange(x[slot_patches], "s cell c -> s (c cell)")  # channel-major: (c, dy, dx)
        hidden = Affine(self.hidden_size, self.numerics, name="w1")(grouped)
        hidden = self.numerics.round(jax.nn.gelu(hidden.astype(jnp.float32), approximate=False))
        return Affine(self.hidden_size, self.numerics, name="w2")(hidden)


class ImageSpan(nn.Module):
    """Embeddings of a whole span, on the root subtree: patches [n, 3, p, p] -> [S, D]. Padding slots are zero."""

    config: VisionConfig
    hidden_size: int
    numerics: Numerics

    @nn.compact
    def __call__(self, patches: Array, tables: SpanTables) -> Array:
        valid = jnp.arange(patches.shape[0]) < tables.patch_count
        tower = VisionTransformer(self.config, self.numerics, name="vision")
        x = tower(patches, tables.cos, tables.sin, valid)
        rows = Aligner(self.hidden_size, self.numerics, name="aligner")(x, tables.slot_patches)
        rows = jnp.where(tables.slot_types[:, None] == TokenType.IMAGE, rows, jnp.zeros_like(rows))
        names = {TokenType.START: "image_start", TokenType.NEW_LINE: "image_newline", TokenType.END: "image_end"}
        for token_type, name in names.items():
            vector = self.param(name, nn.initializers.normal(0.02), (self.hidden_size,)).astype(rows.dtype)
            rows = jnp.where(tables.slot_types[:, None] == token_type, vector, rows)
        return rows


@functools.partial(jax.jit, static_argnames=("config", "hidden_size", "numerics"))
def _embed_span(
    params: dict, patches: Array, tables: SpanTables, config: VisionConfig, hidden_size: int, numerics: Numerics
) -> Array:
    return ImageSpan(config, hidden_size, numerics).apply({"params": params}, patches, tables)


def embed_span(params: dict, image: ImageInput, config: ModelConfig, numerics: Numerics) -> Array:
    """The span of an image, padded: [max_image_tokens, D] in the activation dtype; slots past the span are zero.

    Args:
        params: the model's parameters (only vision, aligner and the three delimiter vectors are read).
        image: the image; its start is not used.
        config: the model's config.
        numerics: the numerics in use.

    Raises:
        ValueError: the model takes no images, or the image is larger than it takes.
    """
    vision = vision_config(config)
    if span_length(image.grid, vision) > vision.max_image_tokens:
        raise ValueError(f"an image of grid {image.grid} takes more than {vision.max_image_tokens} tokens")
    tables = span_tables(image.grid, vision)
    padding = len(tables.cos) - len(image.patches)
    patches = np.pad(image.patches.astype(numerics.dtype), ((0, padding), (0, 0), (0, 0), (0, 0)))
    return _embed_span({k: params[k] for k in SPAN_PARAMS}, patches, tables, vision, config.hidden_size, numerics)


@jax.jit
def place_span(embeds: Array, span: Array, row: Array, start: Array, length: Array) -> Array:
    """Write the first `length` rows of span [S, D] over embeds [B, T, D] at embeds[row, start:].

    What falls outside [0, T) is dropped, so `start` may be negative: a chunk takes its part of a span that crosses
    its edge.
    """
    slot = jnp.arange(span.shape[0])
    at = start + slot
    at = jnp.where((slot < length) & (at >= 0), at, embeds.shape[1])  # a negative index would wrap, not drop
    return embeds.at[row, at].set(span.astype(embeds.dtype), mode="drop")


def merge_images(
    params: dict, embeds: Array, images: list[list[ImageInput]], config: ModelConfig, numerics: Numerics
) -> Array:
    """Overwrite the image spans of embeds [B, T, D] with their embeddings. `images` as `check_images` returns them."""
    for row, row_images in enumerate(images):
        for image in row_images:
            span = embed_span(params, image, config, numerics)
            embeds = place_span(embeds, span, row, image.start, span_length(image.grid, vision_config(config)))
    return embeds
