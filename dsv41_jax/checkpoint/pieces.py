"""Released tensors cut into pieces: what a conversion reads, writes and keeps account of at a time.

A piece is a run of rows of one tensor, so no tensor need be whole in memory. In the Orbax layout each piece is a chunk,
so a chunk is written once, by one process; and a process that wants some rows of a tensor reads the pieces they lie in.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dsv41_jax.checkpoint.manifest import TensorSpec

PIECE_BYTES = 8 << 20  # at most; the expert matrices of the released model have 5.9 MB


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the released tensor `name`, and their bytes."""

    name: str
    start: int
    stop: int
    nbytes: int


def piece_rows(spec: TensorSpec) -> int:
    """Rows of a tensor in one piece: the tensor's, halved until they fit into PIECE_BYTES (or are one)."""
    rows, row_bytes = spec.shape[0], spec.nbytes // spec.shape[0]
    parts = 1
    while -(-rows // parts) * row_bytes > PIECE_BYTES and parts < rows:
        parts *= 2
    return -(-rows // parts)


def pieces(spec: TensorSpec) -> Iterator[Piece]:
    """The pieces of a tensor, in order."""
    row_bytes, step = spec.nbytes // spec.shape[0], piece_rows(spec)
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
