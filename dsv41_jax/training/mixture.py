"""A stream of documents from several sources, mixed by shares of tokens.

The next document comes from the source that is furthest behind its share of the tokens so far. `grain`'s own mixing
counts documents; the report's shares are of tokens. Each source is visited in an order of its own, drawn anew every
epoch from the seed by `grain`'s index shuffle, so a position in the stream is one number a source.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import grain

from dsv41_jax.training.records import CorruptRecordError, Document
from dsv41_jax.training.sources import Source

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A document with BOS and EOS, and where it came from: number of the source, position in that source's order."""

    source: int
    position: int
    document: Document


class Mixture(Iterator[Drawn]):
    """Endless (or of `epochs` epochs) iterator over documents.

    Args:
        sources: at least one. weights: shares of the tokens, any positive scale.
        bos, eos: ids to add to documents of sources that are not complete; None adds none.
        vocab_size: ids below it are allowed.
        seed: of the orders. shuffle: False visits documents in their stored order.
        epochs: how often each source is read; 0 for ever.
        skip_corrupt: count and skip records that cannot be read, instead of raising CorruptRecordError.

    Attributes:
        corrupt: records skipped so far, of each source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        bos: int | None,
        eos: int | None,
        vocab_size: int,
        seed: int,
        shuffle: bool = True,
        epochs: int = 0,
        skip_corrupt: bool = False,
    ) -> None:
        self.sources, self._weights = tuple(sources), [float(w) for w in weights]
        self._bos, self._eos, self._vocab_size, self._skip_corrupt = bos, eos, vocab_size, skip_corrupt
        self._orders = []
        for number, source in enumerate(self.sources):
            order = grain.MapDataset.range(len(source))
            order = order.shuffle(seed=(seed + 7919 * number) % 2**32) if shuffle else order
            self._orders.append(order.repeat(epochs or None))
        self._lengths = [len(source) * epochs if epochs else None for source in self.sources]
        self._positions = [0] * len(self.sources)
        self.tokens = [0] * len(self.sources)
        self.corrupt = [0] * len(self.sources)

    def read(self, source: int, position: int) -> Document:
        """The document at a position of a source's order. Raises CorruptRecordError, ValueError for ids too large."""
        origin = self.sources[source]
        document = origin[self._orders[source][position]]
        ids = document.token_ids
        if len(ids) and ids.max() >= self._vocab_size:
            raise ValueError(
                f"{origin.name}: token id {ids.max()}, but the model has {self._vocab_size}: the data "
                "were made with another tokenizer"
            )
        return document if origin.complete else document.framed(self._bos, self._eos)

    def __next__(self) -> Drawn:
        while True:
            left = [i for i, n in enumerate(self._lengths) if n is None or self._positions[i] < n]
            if not left:
                raise StopIteration
            source = min(left, key=lambda i: self.tokens[i] / self._weights[i])
            position = self._positions[source]
            if position >= len(self.sources[source]) and not self.tokens[source]:
                raise ValueError(
                    f"{self.sources[source].name}: none of its {position} documents has tokens "
                    f"({self.corrupt[source]} of them are corrupt)"
                )
            self._positions[source] += 1
            try:
                document = self.read(source, position)
            except CorruptRecordError as error:
                if not self._skip_corrupt:
                    raise
                self.corrupt[source] += 1
                _log.warning("skipped: %s", error)
                continue
            self.tokens[source] += len(document.token_ids)
            if len(document.token_ids):
                return Drawn(source, position, document)

    def get_state(self) -> dict:
        """JSON-able position; `set_state` of an equal mixture goes on from it."""
        return {
            "fingerprints": [source.fingerprint for source in self.sources],
            "positions": list(self._positions),
            "tokens": list(self.tokens),
            "corrupt": list(self.corrupt),
        }

    def set_state(self, state: dict) -> None:
        """Go on from a position; ValueError where it is of other files."""
        own = [source.fingerprint for source in self.sources]
        if state["fingerprints"] != own:
            raise ValueError(f"the saved position is of other data files: {state['fingerprints']}, here are {own}")
        self._positions = list(state["positions"])
        self.tokens = list(state["tokens"])
        self.corrupt = list(state["corrupt"])
