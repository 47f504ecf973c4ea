"""Released tensors cut into pieces: what a conversion reads, writes and keeps account of at a time.

A piece is a run of rows of one tensor, at most PIECE_BYTES of them, so no tensor need be whole in memory. Its edges are
edges of chunks of the Orbax layout, so that every chunk belongs to one piece and is written once, by one process.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dsv41_jax.checkpoint.manifest import TensorSpec

CHUNK_BYTES = 8 << 20  # of a chunk in an Orbax folder; a process that wants some rows reads the chunks they lie in
PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the released tensor `name`, and their bytes."""

    name: str
    start: int
    stop: int
    nbytes: int


def chunk_rows(spec: TensorSpec) -> int:
    """Rows of a tensor in one chunk: the tensor's, halved until they fit into CHUNK_BYTES (or are one)."""
    rows, row_bytes = spec.shape[0], spec.nbytes // spec.shape[0]
    parts = 1
    while -(-rows // parts) * row_bytes > CHUNK_BYTES and parts < rows:
        parts *= 2
    return -(-rows // parts)


def pieces(spec: TensorSpec) -> Iterator[Piece]:
    """The pieces of a tensor, in order."""
    row_bytes, step = spec.nbytes // spec.shape[0], chunk_rows(spec)
    step *= max(1, PIECE_BYTES // (step * row_bytes))
    for start in range(0, spec.shape[0], step):
        stop = min(start + step, spec.shape[0])
        yield Piece(spec.name, start, stop, (stop - start) * row_bytes)


def share(all_pieces: Sequence[Piece], processes: int) -> list[list[Piece]]:
    """The pieces that each of `processes` processes converts: consecutive ones, of about equal bytes.

    The same list and number give the same shares everywhere.
    """
    total, position = max(1, total_bytes(all_pieces)), 0
    shares: list[list[Piece]] = [[] for _ in range(processes)]
    for piece in all_pieces:
        shares[position * processes // total].append(piece)
        position += piece.nbytes
    return shares


def total_bytes(some: Iterable[Piece]) -> int:
    """Bytes of some pieces."""
    return sum(piece.nbytes for piece in some)
