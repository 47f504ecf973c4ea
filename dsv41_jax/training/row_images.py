"""The images of a batch, in arrays whose shapes do not depend on the images.

`images` of a batch, M images a row, P patches an image, S slots of a span:

    patches       bfloat16 [B, M, P, 3, p, p]
    start         int32 [B, M]: row position of the span's START
    cos, sin      float32 [B, M, P, d/2]
    patch_count   int32 [B, M]: 0 where there is no image
    slot_patches  int32 [B, M, S, R*R]; P where the grid has no patch
    slot_types    int32 [B, M, S] `TokenType`

The last five are `vision.SpanTables` of each image.
"""

from __future__ import annotations

import dataclasses

import jax
import ml_dtypes
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.image_plan import TokenType, preprocess_image, span_length, vision_config
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.records import StoredImage
from dsv41_jax.vision import patch_bucket, span_tables


@dataclasses.dataclass(frozen=True)
class ImageCaps:
    """Most images of a row, and the patches that each is padded to."""

    images: int
    patches: int

    @classmethod
    def of(cls, settings: DataSettings, config: ModelConfig) -> ImageCaps:
        """The caps of a pipeline; ValueError where the model takes no images, or none of so many patches."""
        vision = vision_config(config)
        wanted = settings.image_patches or vision.max_image_tokens * vision.downsample_ratio**2
        return cls(settings.images_per_row, patch_bucket(wanted, vision))


def image_shapes(rows: int, caps: ImageCaps, config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the images of a batch of `rows` rows."""
    vision = vision_config(config)
    pixels = (3, vision.patch_size, vision.patch_size)
    half = vision.hidden_size // vision.num_attention_heads // 2
    slots, cells = vision.max_image_tokens, vision.downsample_ratio**2
    each = {
        "patches": ((caps.patches, *pixels), ml_dtypes.bfloat16),
        "start": ((), np.int32),
        "cos": ((caps.patches, half), np.float32),
        "sin": ((caps.patches, half), np.float32),
        "patch_count": ((), np.int32),
        "slot_patches": ((slots, cells), np.int32),
        "slot_types": ((slots,), np.int32),
    }
    lead = (rows, caps.images)
    return {name: jax.ShapeDtypeStruct((*lead, *shape), dtype) for name, (shape, dtype) in each.items()}


def empty_images(rows: int, caps: ImageCaps, config: ModelConfig) -> dict[str, np.ndarray]:
    """Arrays for a batch of `rows` rows, without any image yet."""
    values = {"slot_patches": caps.patches, "slot_types": TokenType.TEXT}
    shapes = image_shapes(rows, caps, config)
    return {name: np.full(leaf.shape, values.get(name, 0), leaf.dtype) for name, leaf in shapes.items()}


def put_image(
    batch: dict, row: int, slot: int, sample_start: int, image: StoredImage, caps: ImageCaps, config: ModelConfig
) -> None:
    """Decode an image into slot `slot` of a row of `batch`; marks its span and takes the weights of targets in it.

    Raises:
        ValueError: an image that the model plans another grid for than was stored.
    """
    vision = vision_config(config)
    patches, grid, _ = preprocess_image(image.encoded, config)
    if grid != image.grid:
        raise ValueError(
            f"an image was tokenised for a grid of {image.grid} patches, this model gives it {grid}: "
            "tokenise the data again with this model's config"
        )
    start = sample_start + image.start
    end = start + span_length(grid, vision)
    batch["image_mask"][row, start:end] = True
    batch["weights"][row, max(start - 1, 0) : end - 1] = 0
    images, tables, count = batch["images"], span_tables(grid, vision), len(patches)
    images["patches"][row, slot, :count] = patches
    images["start"][row, slot] = start
    images["cos"][row, slot, :count] = tables.cos[:count]
    images["sin"][row, slot, :count] = tables.sin[:count]
    images["patch_count"][row, slot] = count
    images["slot_types"][row, slot] = tables.slot_types
    none = tables.slot_patches >= count  # its own padded size, or a cell that sticks out
    images["slot_patches"][row, slot] = np.where(none, caps.patches, tables.slot_patches)
