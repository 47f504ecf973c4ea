"""Host side of an image: its planned size, its pixels and patches, and the layout of its span of tokens.

Nothing here touches an accelerator. A ViT patch is `patch_size` pixels wide; a token covers `downsample_ratio` x
`downsample_ratio` patches; a span is START, then for each row of tokens its IMAGE slots and one NEW_LINE, then END.
"""

import dataclasses
import enum
import io
import math
import os
from pathlib import Path

import einops
import ml_dtypes
import numpy as np
from PIL import Image, ImageOps

from dsv41_jax.config import ModelConfig, VisionConfig

GREY = (127, 127, 127)
ImageSource = Image.Image | bytes | np.ndarray | str | os.PathLike
Grid = tuple[int, int]


class TokenType(enum.IntEnum):
    """Role of a prompt position. Every slot of a span carries the same id, so roles travel beside the ids."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEW_LINE = 2
    END = 3


@dataclasses.dataclass(frozen=True)
class SizePlan:
    """What an image becomes: size in pixels, ViT patches (rows, columns) and tokens (rows, columns)."""

    height: int
    width: int
    grid: Grid
    token_grid: Grid

    @property
    def span_length(self) -> int:
        """Tokens of the whole span, delimiters included."""
        return _span_cost(self.token_grid)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _span_cost(token_grid: Grid) -> int:
    rows, columns = token_grid
    return rows * (columns + 1) + 2


def token_grid(grid: Grid, config: VisionConfig) -> Grid:
    """(rows, columns) of tokens that a grid of (rows, columns) ViT patches takes."""
    return _ceil_div(grid[0], config.downsample_ratio), _ceil_div(grid[1], config.downsample_ratio)


def span_length(grid: Grid, config: VisionConfig) -> int:
    """Length of the span of a grid of ViT patches: rows * (columns + 1) + 2 tokens."""
    return _span_cost(token_grid(grid, config))


def span_token_types(grid: Grid, config: VisionConfig) -> np.ndarray:
    """int32 [span_length] of `TokenType` for a grid of ViT patches."""
    rows, columns = token_grid(grid, config)
    body = np.full((rows, columns + 1), TokenType.IMAGE, np.int32)
    body[:, columns] = TokenType.NEW_LINE
    return np.concatenate([[TokenType.START], body.ravel(), [TokenType.END]]).astype(np.int32)


def plan_size(width: int, height: int, config: VisionConfig) -> SizePlan:
    """Choose the size in pixels that a width x height image is resized to.

    Small images are scaled up to `min_pixels`, sides are rounded up to whole patches, and an image that would take more
    than `max_image_tokens` tokens is scaled down, its aspect ratio kept as far as whole cells allow.

    Raises:
        ValueError: a side is not positive.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image needs at least one pixel each way, got {width} x {height}")
    patch, budget = config.patch_size, config.max_image_tokens
    cell = patch * config.downsample_ratio
    if config.max_wh_ratio is not None and width > height * config.max_wh_ratio:
        width = int(height * config.max_wh_ratio)
    if width * height < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    best_width, best_height = _ceil_div(width, patch) * patch, _ceil_div(height, patch) * patch
    if span_length((best_height // patch, best_width // patch), config) > budget:
        best_height, best_width = _shrink(width, height, patch, cell, budget)
    grid = best_height // patch, best_width // patch
    return SizePlan(best_height, best_width, grid, token_grid(grid, config))


def _shrink(width: int, height: int, patch: int, cell: int, budget: int) -> tuple[int, int]:
    """(height, width) within the token budget: the root of b * (a + 1) + 2 = budget with b / a = height / width."""
    ratio = height / width
    columns = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return (budget - 2) // 2 * cell, cell
    if rows < 1:
        return cell, (budget - 3) * cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    # At least one patch: with downsample_ratio 1 a side can fall below it.
    return tuple(max(math.floor(side * scale / patch), 1) * patch for side in (height, width))


def load_image(image: ImageSource) -> Image.Image:
    """An RGB Pillow image from a Pillow image, encoded bytes, a uint8 array [h, w, 3] or [h, w], or a file path.

    Transparency is dropped, not blended, and the EXIF orientation is not applied: the reference does neither.

    Raises:
        ValueError: bytes that are no image Pillow can decode, or an array of another shape or dtype.
        FileNotFoundError: no such path.
    """
    if isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, bytes | bytearray | memoryview):
        try:
            return Image.open(io.BytesIO(image)).convert("RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # all that Pillow raises on bad data
            raise ValueError(f"these {len(image)} bytes cannot be decoded as an image: {error}") from error
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise ValueError(f"an image array is uint8 [h, w, 3] or [h, w], got {pixels.dtype} {pixels.shape}")
    return Image.fromarray(pixels).convert("RGB")


def resize_image(image: Image.Image, config: VisionConfig) -> np.ndarray:
    """uint8 [height, width, 3] of the planned size: bicubic, centred on grey; stretched from `max_wh_ratio` on."""
    plan = plan_size(image.width, image.height, config)
    size = plan.width, plan.height
    if config.max_wh_ratio is not None and image.width >= config.max_wh_ratio * image.height:
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    return np.asarray(ImageOps.pad(image, size, Image.Resampling.BICUBIC, color=GREY))


def image_patches(rgb: np.ndarray, patch_size: int) -> np.ndarray:
    """uint8 [h, w, 3] -> bf16 [n, 3, p, p] in [-1, 1], patches in reading order. h and w are multiples of p."""
    pixels = rgb.astype(np.float32) / np.float32(255)
    pixels = (pixels - np.float32(0.5)) / np.float32(0.5)
    patches = einops.rearrange(pixels, "(r y) (c x) rgb -> (r c) rgb y x", y=patch_size, x=patch_size)
    return patches.astype(ml_dtypes.bfloat16)


def preprocess_image(image: ImageSource, config: ModelConfig) -> tuple[np.ndarray, Grid, np.ndarray]:
    """Turn an image into what the model takes.

    Args:
        image: Pillow image, encoded bytes, uint8 array [h, w, 3] or [h, w], or a file path.
        config: a config with a vision tower.

    Returns:
        patches bf16 [n, 3, p, p] in reading order, grid (ViT rows, ViT columns), token types int32 [span length].

    Raises:
        ValueError: the image cannot be read, or the config has no vision tower.
    """
    vision = vision_config(config)
    rgb = resize_image(load_image(image), vision)
    grid = rgb.shape[0] // vision.patch_size, rgb.shape[1] // vision.patch_size
    return image_patches(rgb, vision.patch_size), grid, span_token_types(grid, vision)


def vision_config(config: ModelConfig) -> VisionConfig:
    """The vision part of the config; ValueError if the model takes no images."""
    if config.vision is None:
        raise ValueError("this model has no vision tower (no vision_config in its config.json): it takes no images")
    return config.vision
