"""Rows of packed pieces -> the arrays that a training step takes.

    token_ids, targets, segment_ids  int32 [B, T]
    weights                          float32 [B, T]; 0: padding, a document's last token, targets inside an image span
    memory                           {"l<L>": int32 [B, T, columns]} Engram rows; the hash restarts at samples
    replay                           int32 [B, T] window floors, where replay is simulated
    image_mask, images               where the settings allow images, see `row_images`

Samples are numbered 0, 1, 2 ... along a row; padding at its end is one more. The last token of a piece that was cut off
has the document's next token as its target, so that every token but a document's first is a target once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher, segment_starts
from dsv41_jax.engram_layout import engram_layout
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.packing import Piece, Row
from dsv41_jax.training.replay_floor import drawn_prompt_length, replay_floors
from dsv41_jax.training.row_images import ImageCaps, empty_images, image_shapes, put_image


class BatchMaker:
    """Makes batches of a model from rows.

    Args:
        settings: of the pipeline. config: of the model. token_map: integers [vocab_size], raw id -> compressed id, for
            Engram; None for a model without it.
    """

    def __init__(self, settings: DataSettings, config: ModelConfig, token_map: np.ndarray | None) -> None:
        self._settings, self._config = settings, config
        if config.engram_layer_ids and token_map is None:
            raise ValueError("this model has Engram layers: a token_map is needed, see dsv41_jax.token_map")
        self._hasher = EngramHasher(config, token_map) if config.engram_layer_ids else None
        self._caps = ImageCaps.of(settings, config) if settings.images_per_row else None

    def __call__(self, rows: Sequence[Row], numbers: Sequence[int]) -> dict:
        """The batch of some rows; `numbers` are those of the rows in the whole run."""
        settings, config = self._settings, self._config
        shape = (len(rows), settings.length)
        batch = {
            "token_ids": np.full(shape, config.pad_token_id, np.int32),
            "targets": np.full(shape, config.pad_token_id, np.int32),
            "segment_ids": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
        }
        if settings.simulates_replay:
            batch["replay"] = np.zeros(shape, np.int32)
        if self._caps is not None:
            batch["image_mask"] = np.zeros(shape, bool)
            batch["images"] = empty_images(len(rows), self._caps, config)
        for i, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            self._fill(batch, i, row, number)
        batch["memory"] = {}
        if self._hasher is not None:
            compressed = self._hasher.compress(batch["token_ids"], batch.get("image_mask"))
            memory = self._hasher.hash(compressed, starts=segment_starts(batch["segment_ids"]))
            batch["memory"] = {f"l{layer}": memory[j] for j, layer in enumerate(config.engram_layer_ids)}
        return batch

    def _fill(self, batch: dict, i: int, row: Row, number: int) -> None:
        at, slot = 0, 0
        for sample, piece in enumerate(row.pieces):
            end = at + len(piece)
            ids = piece.drawn.document.token_ids
            following = ids[piece.start + 1 : piece.stop + 1]  # one short at the document's end
            batch["token_ids"][i, at:end] = ids[piece.start : piece.stop]
            batch["targets"][i, at : at + len(following)] = following
            batch["segment_ids"][i, at:end] = sample
            batch["weights"][i, at : at + len(following)] = 1
            prompt = _prompt_length(piece)
            if prompt is not None and not self._settings.prompt_loss:
                batch["weights"][i, at : min(end, at + prompt - 1)] = 0
            if "replay" in batch:
                window = self._config.sliding_window
                batch["replay"][i, at:end] = replay_floors(end - at, at, self._replayed(piece, number, sample), window)
            for image in piece.drawn.document.images:
                put_image(batch, i, slot, at, image, self._caps, self._config)
                slot += 1
            at = end
        batch["segment_ids"][i, at:] = len(row.pieces)

    def _replayed(self, piece: Piece, row: int, sample: int) -> int | None:
        settings, prompt = self._settings, _prompt_length(piece)
        if prompt is not None and settings.replay_prompts:
            return prompt
        return drawn_prompt_length(len(piece), settings.replay_probability, settings.seed, row, sample)


def batch_shapes(settings: DataSettings, config: ModelConfig, rows: int | None = None) -> dict:
    """Shapes and dtypes of a batch of `rows` rows (default: of all processes), to compile a step ahead of time."""
    rows = settings.batch if rows is None else rows

    def array(dtype: type, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, settings.length, *more), dtype)

    shapes = {name: array(np.int32) for name in ("token_ids", "targets", "segment_ids")}
    shapes["weights"] = array(np.float32)
    if settings.simulates_replay:
        shapes["replay"] = array(np.int32)
    if settings.images_per_row:
        shapes["image_mask"] = array(np.bool_)
        shapes["images"] = image_shapes(rows, ImageCaps.of(settings, config), config)
    columns = engram_layout(config).columns if config.engram_layer_ids else 0
    shapes["memory"] = {f"l{layer}": array(np.int32, columns) for layer in config.engram_layer_ids}
    return shapes


def _prompt_length(piece: Piece) -> int | None:
    """Prompt tokens from the piece's first token on, None where the prompt ends before it."""
    prompt = piece.drawn.document.prompt_length
    return None if prompt is None or prompt <= piece.start else prompt - piece.start
