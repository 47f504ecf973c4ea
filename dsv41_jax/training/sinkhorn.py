"""Sinkhorn-balanced momentum, the rule of embeddings, prediction head and Engram tables (report, optimizer).

    M <- beta M + (1 - beta) G        A = beta M + (1 - beta) G
    U = A, without the rows whose norm is at most a thousandth of the mean row norm
    U's rows, columns, rows ... are divided by their norms, eleven times in all    W <- W - rate 0.18 sqrt(width) U

U is never stored: it is A between one factor for each row and one for each column.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from dsv41_jax.training.optimizer_settings import OptimizerSettings

TILE_NUMBERS = 1 << 22  # of a table that a pass looks at together: 16 MiB


class SinkhornState(NamedTuple):
    """momentum: a tree like the parameters."""

    momentum: optax.Updates


def _norms(x: Array, axis: int) -> Array:
    return jnp.sqrt(jnp.sum(x * x, axis=axis))


def _inverse(norms: Array, epsilon: float | Array) -> Array:
    """What to multiply by to divide by norms + epsilon. 1 for what is all zero: 1 / epsilon twice would be infinite."""
    return jnp.where(norms > 0, 1 / (norms + epsilon), 1.0)


def balanced(x: Array, settings: OptimizerSettings) -> Array:
    """U of A = `x`, float32 [rows, columns]."""
    norms = _norms(x, 1)
    row = jnp.where(norms > settings.sinkhorn_threshold * jnp.mean(norms), 1.0, 0.0)
    column = jnp.ones(x.shape[1], jnp.float32)
    for count in range(settings.sinkhorn_steps):
        now = row[:, None] * x * column
        if count % 2 == 0:
            row = row * _inverse(_norms(now, 1), settings.epsilon)
        else:
            column = column * _inverse(_norms(now, 0), settings.epsilon)
    return row[:, None] * x * column


def scale_by_sinkhorn(settings: OptimizerSettings) -> optax.GradientTransformation:
    """The rule without rate, on a tree of dense matrices [vocabulary, width]."""
    beta, kept = settings.sinkhorn_momentum, jnp.dtype(settings.momentum_dtype)

    def init(params: optax.Params) -> SinkhornState:
        return SinkhornState(jax.tree.map(lambda x: jnp.zeros(x.shape, kept), params))

    def direction(gradient: Array, momentum: Array) -> Array:
        scale = settings.update_rms * gradient.shape[1] ** 0.5
        return scale * balanced(beta * momentum + (1 - beta) * gradient, settings)

    def update(gradients: optax.Updates, state: SinkhornState, params: optax.Params | None = None):
        momentum = jax.tree.map(lambda m, g: beta * m.astype(jnp.float32) + (1 - beta) * g, state.momentum, gradients)
        updates = jax.tree.map(direction, gradients, momentum)
        return updates, SinkhornState(jax.tree.map(lambda m: m.astype(kept), momentum))

    return optax.GradientTransformation(init, update)


# Tables whose gradient is a few rows


def sum_duplicates(ids: Array, gradients: Array, rows: int) -> tuple[Array, Array]:
    """Every row once, with the sum of its gradients, at the first place that names it.

    Args:
        ids: int32 [n]; those outside 0..rows-1 are left out. gradients: [n, width].

    Returns:
        ids and gradients of the same shapes; the places that are left over have id `rows` and gradient 0.
    """
    places = jnp.arange(len(ids), dtype=jnp.int32)
    ids = jnp.where((ids >= 0) & (ids < rows), ids, rows)
    first = jnp.full(rows, len(ids), jnp.int32).at[ids].min(places, mode="drop")
    owner = first.at[ids].get(mode="fill", fill_value=len(ids))
    summed = jnp.zeros_like(gradients).at[owner].add(gradients, mode="drop")
    return jnp.where(owner == places, ids, rows), summed


def update_rows(
    table: Array,
    momentum: Array,
    ids: Array,
    gradients: Array,
    rate: Array | float,
    settings: OptimizerSettings,
    *,
    rows: int | None = None,
    first_row: Array | int = 0,
    axes: str | Sequence[str] = (),
    apply: Array | bool = True,
    tile: int | None = None,
) -> tuple[Array, Array]:
    """One step of a table, exactly the dense rule though its gradient is given by rows.

    The rule does not depend on the scale of A. Of a row without gradient A is beta M, so A / beta is M itself, and
    only the rows with a gradient have to be put into the momentum, and taken out at the end. The table is passed over
    in tiles; beside table and momentum, which are changed in place when they are donated, there is one number a row
    and a few times the size of `gradients`.

    Args:
        table: float32 [R, width], a device's share of the rows inside `shard_map`, else all.
        momentum: [R, width], float32; of another dtype the rows with a gradient are rounded to it before balancing.
        ids: int32 [n], rows of the whole table, in any order and more than once; those of other devices are ignored.
            A device must be given all that is for its rows. gradients: float32 [n, width].
        rate: the schedule's; a table moves `settings.table_rate` times as fast.
        rows: of the whole table, without padding: over them the mean row norm is taken. Needed with `axes`.
        first_row: of this share.
        axes: mesh axes that share the rows.
        apply: False leaves table and momentum as they are, whatever the gradients hold.
        tile: rows of a tile.

    Returns:
        (table, momentum).
    """
    if axes and rows is None:
        raise ValueError("update_rows(rows=None): with axes, give the number of rows of the whole table")
    share, width = table.shape
    tile = min(share, tile or max(1, TILE_NUMBERS // width))
    beta = settings.sinkhorn_momentum
    decay, rate = jnp.where(apply, beta, 1.0), jnp.where(apply, rate, 0.0)
    ids, gradients = sum_duplicates(ids - first_row, jnp.where(apply, gradients, 0.0), share)

    def total(x: Array) -> Array:
        return lax.psum(x, axes) if axes else x

    old = momentum.at[ids].get(mode="fill", fill_value=0).astype(jnp.float32)
    mixed = old + (1 - beta) * (1 + beta) / beta**2 * gradients  # A / beta^2, which decays to A / beta
    momentum = momentum.at[ids].set(mixed.astype(momentum.dtype), mode="drop")
    momentum, norms = _decayed(momentum, decay, tile)
    table = _stepped(table, momentum, norms, rate, rows or share, total, settings, tile)
    new = decay * old + (1 - beta) * gradients
    # That these rows depend on the moved table orders them after the last look at the momentum: the compiler would copy
    # it to be free of that order.
    ids = jnp.where(jnp.isfinite(table[0, 0]), ids, share)
    return table, momentum.at[ids].set(new.astype(momentum.dtype), mode="drop")


def update_visited_rows(
    table: Array,
    momentum: Array,
    visit: Callable[[Callable[[Array, Array, Array], Array], Array], Array],
    rate: Array | float,
    settings: OptimizerSettings,
    *,
    rows: int,
    axes: str | Sequence[str],
    apply: Array | bool = True,
    tile: int | None = None,
) -> tuple[Array, Array]:
    """`update_rows` where the gradients of a device's rows never are in its memory together.

    Args:
        table, momentum: this device's rows, float32.
        visit: `visit(body, x)` returns x after x = body(x, own row ids [m], gradients [m, width]) for one batch of
            gradients after another; an id past the rows stands for none. It is called twice.
        rows, axes, rate, settings, apply, tile: see `update_rows`.

    Returns:
        (table, momentum). The gradients are put into the momentum and taken out of it by addition: rows that have one
        carry its rounding, a part in 10^7.
    """
    share, width = table.shape
    tile = min(share, tile or max(1, TILE_NUMBERS // width))
    beta = settings.sinkhorn_momentum
    decay, rate = jnp.where(apply, beta, 1.0), jnp.where(apply, rate, 0.0)

    def added(factor: float) -> Callable[[Array, Array, Array], Array]:
        def body(x: Array, ids: Array, gradients: Array) -> Array:
            return x.at[ids].add(jnp.where(apply, factor * gradients, 0.0), mode="drop")

        return body

    def total(x: Array) -> Array:
        return lax.psum(x, axes)

    extra = (1 - beta) / beta  # of A / beta over M
    momentum, _ = _decayed(momentum, decay, tile)
    momentum = visit(added(1 - beta + extra), momentum)
    momentum, norms = _decayed(momentum, jnp.float32(1), tile)
    table = _stepped(table, momentum, norms, rate, rows, total, settings, tile)
    return table, visit(added(-extra), momentum)


def _stepped(
    table: Array,
    x: Array,
    norms: Array,
    rate: Array,
    rows: int,
    total: Callable[[Array], Array],
    settings: OptimizerSettings,
    tile: int,
) -> Array:
    """The table after a step by x = A / beta, whose rows have these norms; `rows` is how many all devices have."""
    kept = norms > settings.sinkhorn_threshold * (total(jnp.sum(norms)) / rows)
    # The first row step: of A / beta instead of A, so epsilon is divided likewise.
    row = jnp.where(kept, _inverse(norms, settings.epsilon / settings.sinkhorn_momentum), 0.0)
    row, column = _balance(x, row, total, settings, tile)
    scale = rate * settings.table_rate * settings.update_rms * table.shape[1] ** 0.5
    return _moved(table, x, row, column, scale, settings, tile)


def _over_tiles(rows: int, tile: int, body: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
    """body(first row, which of its rows are new [tile, 1], carry) for tile after tile; the last one begins early enough
    to be whole.
    """

    def step(i: Array, carry: Any) -> Any:
        start = jnp.minimum(i * tile, rows - tile)
        return body(start, (start + jnp.arange(tile) >= i * tile)[:, None], carry)

    return lax.fori_loop(0, -(-rows // tile), step, carry)


def _rows(x: Array, start: Array, tile: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, tile).astype(jnp.float32)


def _put(x: Array, part: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, 0)


def _decayed(momentum: Array, decay: Array, tile: int) -> tuple[Array, Array]:
    """The momentum times `decay`, and the norms of its rows."""

    def body(start: Array, new: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        momentum, norms = carry
        part = _rows(momentum, start, tile)
        part = jnp.where(new, decay * part, part).astype(momentum.dtype)
        return _put(momentum, part, start), _put(norms, _norms(part.astype(jnp.float32), 1), start)

    return _over_tiles(len(momentum), tile, body, (momentum, jnp.zeros(len(momentum), jnp.float32)))


def _row_step(part: Array, row: Array, column: Array, epsilon: float) -> Array:
    """The factors of a tile's rows after they are divided by their norms."""
    return row * _inverse(_norms(row[:, None] * part * column, 1), epsilon)


def _balance(
    x: Array, row: Array, total: Callable[[Array], Array], settings: OptimizerSettings, tile: int
) -> tuple[Array, Array]:
    """Row and column factors after all steps but the first and the last, both of rows: each pass does a step of rows,
    which the first leaves out, and the step of columns that follows it.
    """

    def one(count: Array, factors: tuple[Array, Array]) -> tuple[Array, Array]:
        def body(start: Array, new: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            row, squares = carry
            part, before = _rows(x, start, tile), _rows(row, start, tile)
            after = jnp.where((count > 0) & new[:, 0], _row_step(part, before, column, settings.epsilon), before)
            squares += jnp.sum(jnp.square(jnp.where(new, after[:, None] * part * column, 0)), axis=0)
            return _put(row, after, start), squares

        row, column = factors
        row, squares = _over_tiles(len(x), tile, body, (row, jnp.zeros_like(column)))
        return row, column * _inverse(jnp.sqrt(total(squares)), settings.epsilon)

    return lax.fori_loop(0, settings.sinkhorn_steps // 2, one, (row, jnp.ones(x.shape[1], jnp.float32)))


def _moved(
    table: Array, x: Array, row: Array, column: Array, scale: Array, settings: OptimizerSettings, tile: int
) -> Array:
    """The table minus `scale` times U; the last step of rows is done on the way."""

    def body(start: Array, new: Array, table: Array) -> Array:
        part, factor, before = _rows(x, start, tile), _rows(row, start, tile), _rows(table, start, tile)
        if settings.sinkhorn_steps > 1:
            factor = _row_step(part, factor, column, settings.epsilon)
        return _put(table, jnp.where(new, before - scale * (factor[:, None] * part * column), before), start)

    return _over_tiles(len(table), tile, body, table)
