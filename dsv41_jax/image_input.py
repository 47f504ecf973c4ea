"""Images inside a prompt: the public `ImageInput`, its checks, and the spans of tokens that images take."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv41_jax.arguments import check_whole, is_whole
from dsv41_jax.config import ModelConfig, VisionConfig
from dsv41_jax.image_plan import Grid, TokenType, span_length, span_token_types, vision_config


@dataclasses.dataclass(frozen=True, eq=False)
class ImageInput:
    """One image of one prompt row.

    Attributes:
        patches: float [n, 3, p, p] normalised to [-1, 1] (`preprocess_image` gives bf16), in reading order.
        grid: (ViT rows, ViT columns), rows * columns = n.
        start: index of the span's START in the token row, whose ids are already expanded.

    Raises:
        ValueError: shapes that disagree, a grid or start that is no whole number, a negative start, integer or
            non-finite patches.
    """

    patches: np.ndarray
    grid: Grid
    start: int

    def __post_init__(self) -> None:
        patches = np.asarray(self.patches)
        grid = tuple(self.grid)
        if len(grid) != 2 or not all(is_whole(side) and side >= 1 for side in grid):
            raise ValueError(f"image grid is (ViT rows, ViT columns), both positive whole numbers, got {grid}")
        grid = (int(grid[0]), int(grid[1]))
        start = check_whole("image start", self.start, 0, 2**31 - 1)
        if patches.ndim != 4 or patches.shape[1] != 3 or patches.shape[2] != patches.shape[3]:
            raise ValueError(f"image patches have shape [n, 3, p, p], got {patches.shape}")
        if patches.shape[0] != grid[0] * grid[1]:
            raise ValueError(f"image grid {grid} needs {grid[0] * grid[1]} patches, got {patches.shape[0]}")
        if patches.dtype.kind in "biu":
            raise ValueError(f"image patches are normalised floats, got {patches.dtype}; use preprocess_image")
        if not np.isfinite(patches.astype(np.float32)).all():
            raise ValueError("image patches hold NaN or infinity")
        for name, value in (("patches", patches), ("grid", grid), ("start", start)):
            object.__setattr__(self, name, value)

    def end(self, config: VisionConfig) -> int:
        """Index just past the span's END."""
        return self.start + span_length(self.grid, config)


def check_images(
    images: Sequence[Sequence[ImageInput]] | None,
    token_ids: np.ndarray,
    lengths: np.ndarray | None,
    config: ModelConfig,
) -> list[list[ImageInput]]:
    """Check the images of a batch against its prompts.

    Args:
        images: per row its images, in any order; None is no images.
        token_ids: int [B, T], image spans expanded.
        lengths: int [B] real lengths, or None where every row is full.
        config: the model's config.

    Returns:
        B lists, each in order of position.

    Raises:
        ValueError: the model takes no images, a row is missing, a patch size or span length the model does not take,
            a span beyond its prompt, ids in a span that are not image_token_id, image_token_id outside of the spans
            (where the model takes images), or spans that overlap. TypeError: anything else than lists of `ImageInput`.
    """
    token_ids = np.asarray(token_ids)
    images = [[] for _ in token_ids] if images is None else images
    if not isinstance(images, list | tuple):
        raise TypeError(f"images={images!r}: for each row a list of ImageInput is needed")
    if len(images) != len(token_ids):
        raise ValueError(f"images has {len(images)} rows, token_ids {len(token_ids)}: give a list a row, maybe empty")
    rows = []
    for row, ids in enumerate(token_ids):
        own = images[row]
        if not isinstance(own, list | tuple) or not all(isinstance(image, ImageInput) for image in own):
            raise TypeError(f"images[{row}]={own!r}: a list of ImageInput is needed, maybe empty")
        length = len(ids) if lengths is None else int(lengths[row])
        rows.append(_check_row(sorted(own, key=lambda image: image.start), ids[:length], config, row))
    return rows


def _check_row(images: list[ImageInput], ids: np.ndarray, config: ModelConfig, row: int) -> list[ImageInput]:
    previous_end, outside = 0, ids == config.image_token_id
    for image in images:
        vision, where = vision_config(config), f"row {row}: the image at {image.start}"
        if image.patches.shape[2] != vision.patch_size:
            raise ValueError(f"{where} has patches of {image.patches.shape[2]} pixels, the model {vision.patch_size}")
        end = image.end(vision)
        if end - image.start > vision.max_image_tokens:
            raise ValueError(f"{where} takes {end - image.start} tokens, more than {vision.max_image_tokens}")
        if end > len(ids):
            raise ValueError(f"{where} ends at {end}, beyond the prompt of {len(ids)} tokens")
        if image.start < previous_end:
            raise ValueError(f"{where} overlaps the one that ends at {previous_end}")
        wrong = np.flatnonzero(ids[image.start : end] != config.image_token_id)
        if wrong.size:
            at = image.start + int(wrong[0])
            raise ValueError(f"{where} covers id {ids[at]} at {at}, not image_token_id {config.image_token_id}")
        outside[image.start : end] = False
        previous_end = end
    if config.vision is not None and outside.any():  # to a model without images it is an id like any other
        raise ValueError(
            f"row {row}: token {int(np.flatnonzero(outside)[0])} is image_token_id {config.image_token_id} and in none "
            f"of the row's {len(images)} images"
        )
    return images


def prompt_token_types(images: Sequence[Sequence[ImageInput]], length: int, config: ModelConfig) -> np.ndarray:
    """int32 [B, length] of `TokenType`; the image mask of routing and Engram is `types != TokenType.TEXT`."""
    types = np.full((len(images), length), TokenType.TEXT, np.int32)
    for row, row_images in enumerate(images):
        for image in row_images:
            vision = vision_config(config)
            types[row, image.start : image.end(vision)] = span_token_types(image.grid, vision)
    return types


def expand_placeholders(
    token_ids: Sequence[int], images: Sequence[tuple[np.ndarray, Grid]], config: ModelConfig
) -> tuple[np.ndarray, list[ImageInput]]:
    """Replace each image_token_id of a prompt by the span of its image.

    Args:
        token_ids: ids with one placeholder an image.
        images: (patches, grid) of each image in prompt order, as `preprocess_image` returns them.
        config: the model's config.

    Returns:
        int32 [T] expanded ids, and the images with their start.

    Raises:
        ValueError: as many placeholders as images are needed.
    """
    ids = np.asarray(token_ids, np.int32)
    places = np.flatnonzero(ids == config.image_token_id)
    if len(places) != len(images):
        raise ValueError(f"the prompt has {len(places)} image placeholders for {len(images)} images")
    repeats = np.ones(len(ids), np.int64)
    inputs, shift = [], 0
    for place, (patches, grid) in zip(places, images, strict=True):
        repeats[place] = span_length(grid, vision_config(config))
        inputs.append(ImageInput(patches, grid, int(place) + shift))
        shift += int(repeats[place]) - 1
    return np.repeat(ids, repeats), inputs
