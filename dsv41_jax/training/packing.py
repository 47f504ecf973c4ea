"""Best-fit packing of documents into rows of T tokens.

A document goes whole into the open row that it leaves the least space in. Where it fits in none, a new row is opened;
where no more may be open, the fullest row is closed. With `fill` the closed row takes the document's first tokens, so
that no row has padding and a document is split only where it would fit in no open row; without, the row keeps its
padding. A document of T tokens or more fills rows of its own first. Documents with images are never split.

Rows are handed out in a random order: each is drawn from `mixed` full ones that wait. Without that the rows of a long
document would follow each other, and a batch be little more than one document.

`grain.experimental.BestFitPackIterDataset` closes all its rows when a single document fits in none of them, neither
splits nor counts images, and restores by packing again. Here a state names the pieces of the open rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dsv41_jax.training.mixture import Drawn, Mixture

Place = tuple[int, int, int, int]  # source, position, start, stop


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Tokens [start, stop) of a drawn document."""

    drawn: Drawn
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> Place:
        """What the piece is read again from."""
        return (self.drawn.source, self.drawn.position, self.start, self.stop)


@dataclasses.dataclass(eq=False)
class Row:
    """Pieces side by side, and how many tokens and images they have."""

    pieces: list[Piece] = dataclasses.field(default_factory=list)
    tokens: int = 0
    images: int = 0

    def add(self, piece: Piece) -> None:
        """Put a piece at the end."""
        self.pieces.append(piece)
        self.tokens += len(piece)
        self.images += len(piece.drawn.document.images)


class Packer(Iterator[Row]):
    """Rows of at most `length` tokens from a mixture.

    Args:
        mixture: where documents come from; its position belongs to the packer's state.
        length: T. open_rows: rows that are open at once. fill: split documents rather than pad.
        images: most images of a row.
        image_patches: most ViT patches of an image.
        mixed: full rows that wait, from which the next one is drawn; 0: in the order in which they are filled.
        seed: of the draws.

    Attributes:
        skipped_images: documents left out because their tokens, images or patches are more than a row takes.
        splits: cuts made in documents.
    """

    def __init__(
        self,
        mixture: Mixture,
        length: int,
        open_rows: int,
        fill: bool,
        images: int = 0,
        image_patches: int = 0,
        mixed: int = 0,
        seed: int = 0,
    ) -> None:
        self.mixture, self.length, self._open_rows, self._fill = mixture, length, open_rows, fill
        self._images, self._image_patches = images, image_patches
        self._mixed, self._seed = mixed, seed
        self._open: list[Row] = []
        self._ready: list[Row] = []
        self._ended = False
        self._handed_out = 0
        self.skipped_images = self.splits = 0

    def __next__(self) -> Row:
        while len(self._ready) <= self._mixed and not self._ended:
            try:
                drawn = next(self.mixture)
            except StopIteration:
                self._ended = True
                self._ready.extend(self._open)
                self._open = []
                continue
            if self._fits_a_row(drawn):
                self._place(Piece(drawn, 0, len(drawn.document.token_ids)))
                continue
            self.skipped_images += 1
            if self.skipped_images >= sum(map(len, self.mixture.sources)) and not (self._open or self._ready):
                raise ValueError(
                    f"all {self.skipped_images} documents have images that no row takes: raise images_per_row "
                    f"({self._images}), image_patches ({self._image_patches}) or length ({self.length})"
                )
        if not self._ready:
            raise StopIteration
        place = 0
        if self._mixed:  # by a counter: the same whatever was drawn before
            generator = np.random.Generator(np.random.Philox(key=[self._seed, 0x3117], counter=self._handed_out))
            place = int(generator.integers(len(self._ready)))
        self._handed_out += 1
        return self._ready.pop(place)

    def _fits_a_row(self, drawn: Drawn) -> bool:
        images = drawn.document.images
        if not images:
            return True
        patches = max(image.grid[0] * image.grid[1] for image in images)
        within = len(images) <= self._images and patches <= self._image_patches
        return within and len(drawn.document.token_ids) <= self.length

    def _place(self, piece: Piece) -> None:
        while len(piece) >= self.length:
            piece = self._cut(piece, self.length, Row())
        while len(piece):
            row = self._best(piece)
            if row is not None:
                piece = self._cut(piece, len(piece), row)
            elif len(self._open) < self._limit(piece):
                self._open.append(Row())
            else:
                fullest = max(self._open, key=lambda row: row.tokens)  # the oldest of several
                if self._fill and not piece.drawn.document.images:
                    piece = self._cut(piece, self.length - fullest.tokens, fullest)
                else:
                    self._open.remove(fullest)
                    self._ready.append(fullest)

    def _limit(self, piece: Piece) -> int:
        # What cannot be split does not close a row that later documents can fill, until there are too many of them.
        return self._open_rows * (2 if self._fill and piece.drawn.document.images else 1)

    def _best(self, piece: Piece) -> Row | None:
        """The open row that has room for the piece and the least of it, the oldest of several."""
        room = self.length - len(piece)
        images = self._images - len(piece.drawn.document.images)
        return max(
            (row for row in self._open if row.tokens <= room and row.images <= images),
            key=lambda row: row.tokens,
            default=None,
        )

    def _cut(self, piece: Piece, tokens: int, row: Row) -> Piece:
        """Put the first `tokens` of a piece into a row, which closes when full; returns the rest."""
        middle = piece.start + tokens
        row.add(Piece(piece.drawn, piece.start, middle))
        self.splits += middle < piece.stop
        if row.tokens == self.length:
            if row in self._open:
                self._open.remove(row)
            self._ready.append(row)
        return Piece(piece.drawn, middle, piece.stop)

    def get_state(self) -> dict:
        """JSON-able: where the mixture is, and the pieces of the rows that were not handed out."""
        return {
            "mixture": self.mixture.get_state(),
            "open": [_places(row) for row in self._open],
            "ready": [_places(row) for row in self._ready],
            "ended": self._ended,
            "handed_out": self._handed_out,
            "skipped_images": self.skipped_images,
            "splits": self.splits,
        }

    def set_state(self, state: dict) -> None:
        """Go on from a state of an equal packer; reads the documents of the rows that it names again.

        Raises ValueError where it is of other files, CorruptRecordError where a document has become unreadable.
        """
        self.mixture.set_state(state["mixture"])
        self._open = [self._row(places) for places in state["open"]]
        self._ready = [self._row(places) for places in state["ready"]]
        self._ended, self._handed_out = state["ended"], state["handed_out"]
        self.skipped_images, self.splits = state["skipped_images"], state["splits"]

    def _row(self, places: list[int]) -> Row:
        row = Row()
        for at in range(0, len(places), 4):
            source, position, start, stop = places[at : at + 4]
            row.add(Piece(Drawn(source, position, self.mixture.read(source, position)), start, stop))
        return row


def _places(row: Row) -> list[int]:
    """All pieces' places in one flat list: a state is copied with every batch."""
    return [number for piece in row.pieces for number in piece.place]
