"""The training data: documents -> mixture -> packed rows -> batches, with a position that a checkpoint keeps.

    pipeline = open_pipeline(settings, config, token_map)
    batch = next(pipeline)                    # a dict of numpy arrays, see batches.py
    state = pipeline.get_state()              # JSON-able; of the batches handed out, whatever was made ahead
    pipeline.set_state(state)                 # the next batches are bit for bit those that followed
    pipeline.statistics()

Every process reads all documents and packs all rows, so the global batch and the state do not depend on how many there
are; each makes the arrays (Engram hashes, pixels) of its own rows alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from grain.experimental import ThreadPrefetchDatasetIterator

from dsv41_jax.config import ModelConfig
from dsv41_jax.training.batches import BatchMaker
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.mixture import Mixture
from dsv41_jax.training.packing import Packer, Row
from dsv41_jax.training.row_images import ImageCaps
from dsv41_jax.training.sources import open_source

_FORMAT = 1
_MUST_AGREE = ("length", "open_rows", "mixed_rows", "split", "seed", "shuffle", "epochs", "add_bos", "add_eos")


class _Batches(Iterator[dict]):
    """The pipeline without the thread. `first`, `last`: own rows of a batch."""

    def __init__(
        self, settings: DataSettings, config: ModelConfig, packer: Packer, maker: BatchMaker, first: int, last: int
    ) -> None:
        self._settings, self._packer, self._maker = settings, packer, maker
        self._own = slice(first, last)
        self.names = [source.name for source in packer.mixture.sources]
        self._agree = {name: getattr(settings, name) for name in _MUST_AGREE}
        self._rows = self._padding = self._batches = 0

    def __next__(self) -> dict:
        size = self._settings.batch
        rows = list(itertools.islice(self._packer, size))
        if not rows:
            raise StopIteration
        self._padding += sum(self._settings.length - row.tokens for row in rows)
        numbers = range(self._rows, self._rows + size)
        self._rows += len(rows)
        self._batches += 1
        rows += [Row() for _ in range(size - len(rows))]  # the end of the last epoch: rows of padding alone
        return self._maker(rows[self._own], numbers[self._own])

    def get_state(self) -> dict:
        return {
            "format": _FORMAT,
            "settings": self._agree,
            "packer": self._packer.get_state(),
            "rows": self._rows,
            "padding": self._padding,
            "batches": self._batches,
        }

    def set_state(self, state: dict) -> None:
        if state.get("format") != _FORMAT:
            raise ValueError(f"a data position of format {state.get('format')}, this version reads {_FORMAT}")
        changed = [name for name, value in self._agree.items() if state["settings"].get(name) != value]
        if changed:
            was = {name: state["settings"].get(name) for name in changed}
            now = {name: self._agree[name] for name in changed}
            raise ValueError(f"the saved data position was made with {was}, now {now}: it cannot go on from there")
        self._packer.set_state(state["packer"])
        self._rows, self._padding, self._batches = state["rows"], state["padding"], state["batches"]


class Pipeline(Iterator[dict]):
    """Batches, made ahead in a thread; see the module. `open_pipeline` makes one."""

    def __init__(self, batches: _Batches, settings: DataSettings) -> None:
        self._settings, self._names = settings, batches.names
        self._ahead = ThreadPrefetchDatasetIterator(batches, settings.prefetch) if settings.prefetch else None
        self._iterator = batches if self._ahead is None else self._ahead

    def __next__(self) -> dict:
        return next(self._iterator)

    def get_state(self) -> dict:
        """The position behind the last batch handed out; goes through JSON unchanged, the same on every process."""
        return self._iterator.get_state()

    def set_state(self, state: dict) -> None:
        """Go on from a position; ValueError where it is of other files or of settings that change the rows."""
        self._iterator.set_state(state)

    def statistics(self) -> dict:
        """What was handed out, and what was left out to make it.

        Returns:
            batches, rows, tokens (without padding), padding_share (of the rows' tokens), splits (documents cut),
            corrupt_records, skipped_images (documents), and for each source its share of the tokens read so far.
        """
        state = self.get_state()
        places, mixture = state["rows"] * self._settings.length, state["packer"]["mixture"]
        read = max(sum(mixture["tokens"]), 1)
        return {
            "batches": state["batches"],
            "rows": state["rows"],
            "tokens": places - state["padding"],
            "padding_share": state["padding"] / max(places, 1),
            "splits": state["packer"]["splits"],
            "corrupt_records": sum(mixture["corrupt"]),
            "skipped_images": state["packer"]["skipped_images"],
            "shares": {name: n / read for name, n in zip(self._names, mixture["tokens"], strict=True)},
        }

    def close(self) -> None:
        """End the thread."""
        if self._ahead is not None:
            self._ahead.close()


def open_pipeline(
    settings: DataSettings,
    config: ModelConfig,
    token_map: np.ndarray | None = None,
    *,
    shard: int = 0,
    shards: int = 1,
) -> Pipeline:
    """A pipeline at its beginning.

    Args:
        settings: what to read and how.
        config: of the model.
        token_map: integers [vocab_size], raw id -> compressed id; needed where the model has Engram layers.
        shard, shards: this process gives rows [shard, shard + 1) * batch / shards of each batch; processes that hold
            the same rows say the same shard.

    Raises:
        FileNotFoundError: no data at a path.
        ValueError: a batch that cannot be shared out, files that are no data, images for a model without a tower.
    """
    if settings.batch % shards or not 0 <= shard < shards:
        raise ValueError(f"batch={settings.batch} rows cannot be shared out as shard {shard} of {shards}")
    maker = BatchMaker(settings, config, token_map)
    names = [source.name or source.path for source in settings.sources]
    mixture = Mixture(
        [open_source(s.path, config.bos_token_id, name) for s, name in zip(settings.sources, names, strict=True)],
        [source.weight for source in settings.sources],
        bos=config.bos_token_id if settings.add_bos else None,
        eos=config.eos_token_id if settings.add_eos else None,
        vocab_size=config.vocab_size,
        seed=settings.seed,
        shuffle=settings.shuffle,
        epochs=settings.epochs,
        skip_corrupt=settings.on_corrupt == "skip",
    )
    patches = ImageCaps.of(settings, config).patches if settings.images_per_row else 0
    packer = Packer(
        mixture,
        settings.length,
        settings.open_rows,
        settings.split == "fill",
        settings.images_per_row,
        patches,
        settings.mixed_rows if settings.shuffle else 0,
        settings.seed,
    )
    own = settings.batch // shards
    batches = _Batches(settings, config, packer, maker, shard * own, (shard + 1) * own)
    return Pipeline(batches, settings)
