"""Runs steps against the paged cache of a server. Every host of a pod has one, and all run the same steps."""

import dataclasses

import jax
import numpy as np
from jax import Array

from dsv41_jax import sharding
from dsv41_jax.cache import pages_for, zero_arrays
from dsv41_jax.image_input import ImageInput
from dsv41_jax.image_plan import span_length, vision_config
from dsv41_jax.runner import Runner
from dsv41_jax.serving.steps import Block, EmbedImage, SetRows, Step
from dsv41_jax.vision import embed_span


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """How large a server's cache is.

    Attributes:
        rows: requests that run at once. max_len: tokens a row can hold.
        pages: pages of the pools of each device. shards: devices among which rows and pages are split.
    """

    rows: int
    max_len: int
    pages: int
    shards: int = 1

    @property
    def per_row(self) -> int:
        """Pages of a row's table."""
        return pages_for(self.max_len)

    def shard_of(self, row: int) -> int:
        """Which of the devices holds a row."""
        return row // (self.rows // self.shards)


def decode_tile(rows: int, tile: int) -> int:
    """Rows of a decode step; ValueError if they are no whole part of all rows."""
    tile = min(tile, rows)
    if rows % tile:
        raise ValueError(f"rows={rows} is no multiple of decode_rows={tile}, the rows that a decode step takes")
    return tile


class Executor:
    """The cache on this host's devices.

    Attributes:
        runner: the model. size: of the cache. block: tokens of a prompt that a step reads. tile: rows of a decode step.
    """

    def __init__(self, runner: Runner, size: CacheSize, block: int | None = None, tile: int | None = None):
        self.runner, self.size = runner, size
        self.block = block or runner.prefill_block
        self.tile = size.rows if runner.mesh is not None else decode_tile(size.rows, tile or runner.decode_rows)
        config, numerics = runner.config, runner.numerics
        if runner.mesh is None:
            self.arrays = zero_arrays(config, numerics, size.rows, size.max_len, size.pages)
        else:
            self.arrays = sharding.zero_cache(config, numerics, runner.mesh, size.rows, size.max_len, size.pages)
        self._tables = np.zeros((size.rows, size.per_row), np.int32)
        self._floors = np.zeros((2, size.rows), np.int32)

    def run(self, step: Step) -> Array | np.ndarray | None:
        """Run a step.

        Returns:
            of a block through all layers, logits float32 [b, V] (or [b, 1, V] of single tokens) at each row's last
            token; of an image its span [tokens, D]; of the rest None.
        """
        if isinstance(step, SetRows):
            return self._set_rows(step)
        if isinstance(step, EmbedImage):
            return self._embed(step)
        return self._block(step)

    def wait(self) -> None:
        """Until the devices have run what was given to them."""
        jax.block_until_ready(self.arrays.encoder_floor)

    def _set_rows(self, step: SetRows) -> None:
        self._tables[step.rows] = step.tables
        self._floors[:, step.rows] = step.floors
        rows = self.size.rows
        self.arrays = self.arrays.replace(
            page_table=self.runner.put(self._tables.copy(), rows),
            encoder_floor=self.runner.put(self._floors[0].copy(), rows),
            decoder_floor=self.runner.put(self._floors[1].copy(), rows),
        )

    def _embed(self, step: EmbedImage) -> np.ndarray:
        runner = self.runner
        image = ImageInput(step.patches, step.grid, 0)
        span = embed_span(runner.params, image, runner.config, runner.numerics)
        return np.asarray(span)[: span_length(step.grid, vision_config(runner.config))]

    def _block(self, step: Block) -> Array | None:
        runner = self.runner
        memory = runner.engram_input(step.engram_rows, self.arrays, of_devices=step.own_rows is not None)
        if step.announced is not None:
            runner.announce_engram(step.announced)
        logits, self.arrays = runner.step(
            self.arrays,
            step.token_ids,
            step.start,
            step.n_valid,
            memory,
            step.image_mask,
            step.image_embeds,
            first=step.first if step.own_rows is None else step.own_rows,
            write_floor=step.write_floor,
            layers=step.layers,
        )
        return logits
