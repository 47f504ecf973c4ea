"""Tiles that keep temporary arrays of the reference code inside a byte budget."""

TEMPORARY_BYTES = 256 << 20  # of a step, beside its inputs, outputs and the residual streams


def largest_tile(count: int, limit: float) -> int:
    """The largest divisor of `count` that is at most `limit`, at least 1."""
    return max((n for n in range(1, count + 1) if count % n == 0 and n <= limit), default=1)
