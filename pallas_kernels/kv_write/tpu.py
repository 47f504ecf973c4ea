"""What the caches keep, for TPUs: one kernel per operation, which writes the pool or ring in place.

Rows of all sequences are one list, in tiles. A tile is normed, rotated, quantised and packed in vector registers; then
the pieces of the pool that it touches are read, merged and written back. A piece is the smallest that a copy can
address: a row of 128 words of a main KV pool or of index scales, a page's tile of index codes, eight rows of a ring,
a sequence's scales of a ring. Neighbouring rows of a sequence share pieces, and then a buffer. Where two sequences may
share one (two pages' scale words stand in one row), or a sequence may come back to one (a ring of few rows), the tile
is written in passes that do not. Tiles run in order, and each waits for its copies.

Copies of different pieces run side by side; a decode step of 64 sequences waits twice for memory, not 128 times.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41_jax import quant
from pallas_kernels.implementation import traced_once
from pallas_kernels.kv_write import lanes, reference
from pallas_kernels.kv_write.lanes import LANES
from pallas_kernels.kv_write.pieces import TILE, Pieces, Rows, load, store

RING_ROWS = 8  # rows of a ring that one copy can address


def _scalar(x: Array | int) -> Array:
    return jnp.asarray(x, jnp.int32).reshape(1)


@traced_once("page_rows", "eps", "interpret")
def main_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    words: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_rows: int,
    eps: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """See `kv_write.main_entries`."""
    rows = Rows(raw, norm, cos, sin, eps)
    latent, words = rows.call(
        functools.partial(_main_kernel, rows, page_rows),
        [_scalar(slot), rows.numbers(page), rows.numbers(place, keep)],
        outputs=[rows.output(rows.width, raw.dtype)],
        pools=[words],
        buffers=[(2, (1, LANES))],  # an entry may end in the row after
        scratch=[pltpu.VMEM((rows.tile, LANES), jnp.int32)],
        name="main_entries",
        interpret=interpret,
    )
    return words, latent[: rows.n, : rows.d].reshape(raw.shape)


def _main_kernel(rows, page_rows, slot, page, place, raw, norm, cos, sin, _, latent, pool, words, *buffers):
    size = reference.main_words(rows.d)
    tile = pl.program_id(0) * rows.tile

    def pool_row(use):
        """Of a use: entry use / 2, the row in which it begins or the one after."""
        entry = tile + (use >> 1)
        return page[entry] * page_rows + (place[entry] * size >> 7) + (use & 1)

    def piece(use):
        where = place[tile + (use >> 1)]
        ends_after = (where * size & (LANES - 1)) + size > LANES
        return (where >= 0) & ((use & 1 == 0) | ends_after), pool_row(use)

    pieces = Pieces(piece, lambda use: pool.at[slot[0], pl.ds(pool_row(use), 1)], *buffers)
    pieces.start_reading()
    codes, scales = lanes.word_moves(rows.d, quant.MAIN_KV_BLOCK, size - rows.d // 8, rows.d // 8)

    def pack(chunk):
        normed = lanes.rms_norm(load(raw, chunk), load(norm), rows.d, rows.eps)
        store(latent, chunk, normed)
        turned = lanes.rotate(normed, load(cos, chunk), load(sin, chunk), rows.still)
        quantised = [lanes.q4_main(column) for column in turned]
        packed = lanes.place([code for code, _ in quantised], codes)
        words[chunk] = packed | lanes.place([scale for _, scale in quantised], scales)

    rows.each_chunk(pack)
    pieces.wait()
    lane = lanes.lane_numbers(1)

    def merge(i):
        begin = place[tile + i] * size & (LANES - 1)
        entry = pltpu.roll(words[pl.ds(i, 1)], begin, 1)
        for part, low in ((0, begin), (1, begin - LANES)):
            at = pieces.buffer_of(2 * i + part)
            pieces.buffer[at] = jnp.where((lane >= low) & (lane < low + size), entry, pieces.buffer[at])

    rows.each_row(merge)
    pieces.write()


@traced_once("page_entries", "eps", "interpret")
def index_entries(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    slot: Array | int,
    page: Array,
    place: Array,
    keep: Array,
    *,
    page_entries: int,
    eps: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """See `kv_write.index_entries`."""
    rows = Rows(raw, norm, cos, sin, eps)
    codes, scales = rows.call(
        functools.partial(_index_kernel, rows, page_entries),
        [_scalar(slot), rows.numbers(page), rows.numbers(place, keep)],
        outputs=[],
        pools=[codes, scales],
        buffers=[(1, codes.shape[2:]), (1, (1, LANES))],
        scratch=[pltpu.VMEM((TILE, LANES), jnp.int32), pltpu.VMEM((LANES, TILE), jnp.int32)],
        name="index_entries",
        interpret=interpret,
    )
    return codes, scales


def _index_kernel(rows, entries, slot, page, place, raw, norm, cos, sin, _, __, codes, scales, words, turned, *buffers):
    tile = pl.program_id(0) * rows.tile
    together = LANES // entries  # pages whose scales share a row, and words of a key that share a row
    shift = together.bit_length() - 1
    pieces = Pieces(
        lambda use: (place[tile + use] >= 0, page[tile + use]),
        lambda use: codes.at[slot[0], page[tile + use]],
        *buffers[:3],
    )
    pieces.start_reading()

    def scale_piece(number, use):
        at = page[tile + use]
        return (place[tile + use] >= 0) & (at & (together - 1) == number), at >> shift

    passes = [
        Pieces(
            functools.partial(scale_piece, number),
            lambda use: scales.at[slot[0], pl.ds(page[tile + use] >> shift, 1)],
            *buffers[3:],
        )
        for number in range(together)  # the pages at the same place of their rows of scales
    ]
    passes[0].start_reading()
    scale_word = LANES - 1  # of a row's words: the last lane is free
    code_moves, scale_moves = lanes.word_moves(rows.d, quant.BLOCK, 1, scale_word)

    def pack(chunk):
        normed = lanes.rms_norm(load(raw, chunk), load(norm), rows.d, rows.eps)
        (column,) = lanes.rotate(normed, load(cos, chunk), load(sin, chunk), rows.still)
        code, scale = lanes.q4_index(column)
        words[chunk] = lanes.place([code], code_moves) | lanes.place([scale], scale_moves)

    rows.each_chunk(pack)
    turned[...] = words[...].T  # a word to a row, an entry of the tile to a lane
    pieces.wait()

    tile_rows = pieces.buffer.shape[1]
    lane = lanes.lane_numbers(tile_rows)
    row = jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0)
    exists = row * together + (lane >> entries.bit_length() - 1) < rows.d // 8
    # Word `together` * row + m of a key stands in the page's row `row`, from lane m * entries on.
    columns = [turned[pl.ds(m, tile_rows, stride=together)] for m in range(together)]

    def merge(i):
        at = pieces.buffer_of(i)
        new = pieces.buffer[at]
        for m, column in enumerate(columns):
            target = place[tile + i] + m * entries
            # `roll` takes turns of 0 to 127.
            moved = pltpu.roll(column, (target + LANES - i) & (LANES - 1), 1)
            new = jnp.where((lane == target) & exists, moved, new)
        pieces.buffer[at] = new

    rows.each_row(merge)
    pieces.write()

    words_of_scales = turned[pl.ds(scale_word, 1)]
    for number, scale_pieces in enumerate(passes):
        if number:
            scale_pieces.start_reading()
        scale_pieces.wait()

        def merge_scale(i, number=number, pieces=scale_pieces):
            at, target = pieces.buffer_of(i), place[tile + i] + number * entries
            moved = pltpu.roll(words_of_scales, (target + LANES - i) & (LANES - 1), 1)
            pieces.buffer[at] = jnp.where(lane[:1] == target, moved, pieces.buffer[at])

        rows.each_row(merge_scale)
        scale_pieces.write()


@traced_once("eps", "interpret")
def window_rows(
    raw: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    codes: Array,
    scales: Array,
    layer: Array | int,
    start: Array,
    n_valid: Array,
    *,
    eps: float,
    interpret: bool,
) -> tuple[Array, Array, Array, Array]:
    """See `kv_write.window_rows`."""
    rows = Rows(raw, norm, cos, sin, eps)
    b, t, d = raw.shape
    size = codes.shape[2]
    piece_rows = RING_ROWS if size % RING_ROWS == 0 else size
    i = jnp.arange(t)
    kept = (i < n_valid[:, None]) & (i >= n_valid[:, None] - size)
    own_codes, own_scales, codes, scales = rows.call(
        functools.partial(_window_kernel, rows, piece_rows, t),
        [
            _scalar(layer),
            rows.numbers(jnp.broadcast_to(jnp.arange(b)[:, None], (b, t))),
            rows.numbers((start[:, None] + i) % (2 * size), kept),  # a ring slot, and whether of an odd round
        ],
        outputs=[rows.output(rows.width, jnp.uint8), rows.output(LANES, jnp.int32)],
        pools=[codes, scales],
        buffers=[(1, (piece_rows, d)), (1, scales.shape[2:])],
        scratch=[
            pltpu.VMEM((rows.tile, rows.width), jnp.int32),
            pltpu.VMEM((TILE, LANES), jnp.int32),
            pltpu.VMEM((LANES, TILE), jnp.int32),
        ],
        name="window_rows",
        interpret=interpret,
    )
    own_codes = own_codes[: rows.n, :d].reshape(b, t, d)
    own_scales = own_scales[: rows.n, : d // quant.BLOCK].reshape(b, t, -1).swapaxes(1, 2).astype(jnp.uint8)
    return codes, scales, own_codes, own_scales


def _window_kernel(rows, piece_rows, t, layer, sequence, place, raw, norm, cos, sin, _, __, *refs):
    own, own_scales, codes, scales, new_rows, words, turned, *buffers = refs
    tile = pl.program_id(0) * rows.tile
    size = codes.shape[2]

    def slot_of(use):
        at = place[tile + use]
        return jnp.where(at >= size, at - size, at)

    def begin_of(use):
        """Where the piece of the ring begins."""
        return slot_of(use) & -RING_ROWS if piece_rows == RING_ROWS else 0

    scale_pieces = Pieces(
        lambda use: (place[tile + use] >= 0, sequence[tile + use]),
        lambda use: scales.at[layer[0], sequence[tile + use]],
        *buffers[3:],
    )
    scale_pieces.start_reading()

    def ring_piece(number, use):
        at = place[tile + use]
        kept = at >= 0 if number is None else (at >= 0) & ((at >= size) == bool(number))
        return kept, sequence[tile + use] * size + begin_of(use)

    def ring_rows(use):
        begin = pl.multiple_of(begin_of(use), piece_rows)
        return codes.at[layer[0], sequence[tile + use], pl.ds(begin, piece_rows)]

    # Rows of one sequence in a tile that go round the ring may come back to the piece they began in.
    come_back = min(t, rows.tile) > size - piece_rows
    rounds = [
        Pieces(functools.partial(ring_piece, number), ring_rows, *buffers[:3])
        for number in ((0, 1) if come_back else (None,))
    ]
    rounds[0].start_reading()
    blocks = rows.d // quant.BLOCK
    scale_moves = [(g * quant.BLOCK, 1, 0, g) for g in range(blocks)]

    def quantise(chunk):
        normed = lanes.rms_norm(load(raw, chunk), load(norm), rows.d, rows.eps)
        rotated = lanes.rotate(normed, load(cos, chunk), load(sin, chunk), rows.still)
        quantised = [lanes.q8(column) for column in rotated]
        store(new_rows, chunk, [code for code, _ in quantised])
        store(own, chunk, [code for code, _ in quantised])
        words[chunk] = lanes.place([scale for _, scale in quantised], scale_moves)

    rows.each_chunk(quantise)
    own_scales[...] = words[: rows.tile]
    turned[...] = words[...].T  # a scale to a row, a row of the tile to a lane
    scale_pieces.wait()
    column = turned[:blocks]
    slots = jax.lax.broadcasted_iota(jnp.int32, (blocks, size), 1)

    def merge_scales(i):
        at, target = scale_pieces.buffer_of(i), slot_of(i)
        moved = pltpu.roll(column, (target + LANES - i) & (LANES - 1), 1)
        moved = jnp.concatenate([moved] * -(-size // LANES), axis=1)[:, :size]
        old = scale_pieces.buffer[at].astype(jnp.int32)
        scale_pieces.buffer[at] = jnp.where(slots == target, moved, old).astype(jnp.uint8)

    rows.each_row(merge_scales)
    scale_pieces.write()

    inside = jax.lax.broadcasted_iota(jnp.int32, (piece_rows, rows.d), 0)
    for number, pieces in enumerate(rounds):
        if number:
            pieces.start_reading()
        pieces.wait()

        def merge(i, pieces=pieces):
            at = pieces.buffer_of(i)
            new = new_rows[pl.ds(i, 1)][:, : rows.d]
            old = pieces.buffer[at].astype(jnp.int32)
            pieces.buffer[at] = jnp.where(inside == slot_of(i) - begin_of(i), new, old).astype(jnp.uint8)

        rows.each_row(merge)
        pieces.write()
