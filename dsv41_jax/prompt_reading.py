"""Reads prompts into rows of a cache, block by block.

One row at a time; on a mesh, where every device has rows of its own, all rows together. `ced` says when to read what.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.cache import Cache, CacheArrays
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_input import ImageInput, prompt_token_types
from dsv41_jax.image_plan import TokenType
from dsv41_jax.runner import Runner
from dsv41_jax.vision import merge_images


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a prompt is read: tokens [begin, split) through the encoder, [split, end) through all layers."""

    begin: int
    split: int
    end: int

    @classmethod
    def of(cls, config: ModelConfig, mode: str, n: int, hit: int = 0) -> "Reading":
        """The reading of a prompt of n tokens of which `hit` have their pages."""
        begin = max(hit - config.sliding_window, 0)
        return cls(begin, max(begin, n - config.sliding_window) if mode == "ced" else begin, n)

    def blocks(self, size: int) -> Iterator[tuple[str, int, int]]:
        """(layers, first, stop) of at most `size` tokens each."""
        for layers, first, stop in (("encoder", self.begin, self.split), ("all", self.split, self.end)):
            for at in range(first, stop, size):
                yield layers, at, min(at + size, stop)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row's prompt on the host: ids int32 [n]; image positions bool [n] and embeddings [n, D], or None for text."""

    ids: np.ndarray
    image_mask: np.ndarray | None = None
    image_embeds: np.ndarray | None = None


def prompts_of(
    runner: Runner, token_ids: np.ndarray, lengths: np.ndarray, images: Sequence[Sequence[ImageInput]]
) -> list[Prompt]:
    """Rows of token_ids [B, T] with the images' embeddings made."""
    if not any(images):
        return [Prompt(ids[:n]) for ids, n in zip(token_ids, lengths, strict=True)]
    mask = prompt_token_types(images, token_ids.shape[1], runner.config) != TokenType.TEXT
    zeros = jnp.zeros((*token_ids.shape, runner.config.hidden_size), runner.numerics.dtype)
    embeds = np.asarray(merge_images(runner.params, zeros, images, runner.config, runner.numerics))
    return [Prompt(*(x[:n] for x in row)) for *row, n in zip(token_ids, mask, embeds, lengths, strict=True)]


@dataclasses.dataclass(frozen=True)
class RowWork:
    """What to read into a row of the cache: a prompt, how, and the first token whose entries are written."""

    prompt: Prompt
    reading: Reading
    write_floor: int = 0


def read_rows(
    runner: Runner, cache: Cache, work: dict[int, RowWork], all_logits: bool
) -> tuple[dict[int, Array], CacheArrays]:
    """Read prompts into rows of the cache's arrays (they are spent), block by block.

    One row at a time; on a mesh, where every device has rows of its own, all together.

    Returns:
        by row, logits [1, V] of the last token, or [tokens read by all layers, V]; and the arrays.
    """
    arrays, together = cache.take(), runner.mesh is not None
    logits = {}
    for rows in [sorted(work)] if together else [[row] for row in sorted(work)]:
        blocks = _Blocks(runner, {row: work[row] for row in rows}, len(cache.lengths) if together else None)
        read, arrays = blocks.read(arrays, all_logits)
        logits |= read
    return logits, arrays


class _Blocks:
    """The blocks of some rows, side by side: each row's last one is in the last step.

    Args:
        batch: rows of the cache, where a step takes all of them; None where it takes one row, the only one of `work`.
    """

    def __init__(self, runner: Runner, work: dict[int, RowWork], batch: int | None):
        self.runner, self.work = runner, work
        self.rows = list(work) if batch is None else list(range(batch))
        self.first = self.rows[0] if batch is None else None
        blocks = {row: list(w.reading.blocks(runner.prefill_block)) for row, w in work.items()}
        self.steps: list[tuple[str, dict[int, tuple[int, int]]]] = []
        for layers in ("encoder", "all"):
            own = {row: [b[1:] for b in all_blocks if b[0] == layers] for row, all_blocks in blocks.items()}
            longest = max(map(len, own.values()))
            for i in range(-longest, 0):
                self.steps.append((layers, {row: mine[i] for row, mine in own.items() if len(mine) >= -i}))
        self.hashed = {}
        if runner.hasher is not None:
            for row, w in work.items():
                mask = None if w.prompt.image_mask is None else w.prompt.image_mask[None]
                self.hashed[row] = runner.hasher(w.prompt.ids[None], mask)[0][:, 0]
        self.with_images = any(w.prompt.image_mask is not None for w in work.values())

    def part(self, of: dict[int, np.ndarray], place: dict[int, tuple[int, int]], axis: int = 0) -> np.ndarray:
        """A step's part of something of each row, along an axis, stacked by rows before it. The last token of a part is
        repeated up to the static length, and counts for nothing; idle rows repeat the first row's.
        """
        size, parts = self.runner.prefill_block, []
        for row in self.rows:
            source = row if row in place else next(iter(place))
            first, stop = place[source]
            parts.append(np.take(of[source], np.minimum(np.arange(first, first + size), stop - 1), axis))
        return np.stack(parts, axis)

    def engram_rows(self, step: int) -> np.ndarray | None:
        """Row numbers [layers, B, t, columns] of a step; None without Engram."""
        return self.part(self.hashed, self.steps[step][1], 1) if self.hashed else None

    def read(self, arrays: CacheArrays, all_logits: bool) -> tuple[dict[int, Array], CacheArrays]:
        """Run all steps; see `read_rows`."""
        runner, prompts = self.runner, {row: w.prompt for row, w in self.work.items()}
        pieces: dict[int, list] = {row: [] for row in self.work}
        for number, (layers, place) in enumerate(self.steps):
            memory = runner.engram_input(self.engram_rows(number), arrays)
            if number + 1 < len(self.steps) and self.hashed:
                runner.announce_engram(self.engram_rows(number + 1))
            mask = embeds = None
            if self.with_images:
                mask = self.part({row: p.image_mask for row, p in prompts.items()}, place)
                embeds = self.part({row: p.image_embeds for row, p in prompts.items()}, place)
            spans = [place.get(row, (0, 0)) for row in self.rows]
            logits, arrays = runner.step(
                arrays,
                self.part({row: p.ids for row, p in prompts.items()}, place),
                np.array([first for first, _ in spans]),
                np.array([stop - first for first, stop in spans]),
                memory,
                mask,
                embeds,
                first=self.first,
                write_floor=np.array([self.work[row].write_floor if row in self.work else 0 for row in self.rows]),
                layers=layers,
                all_logits=all_logits,
            )
            if layers == "encoder":
                continue
            if all_logits:
                logits = np.asarray(logits)
            for i, row in enumerate(self.rows):
                if row in place:
                    own = logits[i, : place[row][1] - place[row][0]] if all_logits else logits
                    pieces[row].append(own if all_logits or self.first is not None else logits[i : i + 1])
        return {row: np.concatenate(own) if all_logits else own[-1] for row, own in pieces.items()}, arrays
