"""What the caches keep, for TPUs: one kernel per operation, which writes the pool or ring in place.

Rows of all sequences are one list, in tiles. A tile is normed, rotated, quantised and packed in vector registers; then
the pieces of the pool that it touches are read, merged and written back. A piece is the smallest that a copy can
address: a row of 128 words of a main KV pool or of index scales, a page's tile of index codes, eight rows of a ring,
a sequence's scales of a ring. Several rows of a tile may touch one piece, also rows of two sequences (the scale words
of two pages share a row), so every row is told which row of its tile touches the piece first, and that row's buffer
serves all of them. Tiles run in order, and each waits for its copies: one tile may go on where the last one ended.

Copies of different pieces run side by side; a decode step of 64 sequences waits twice for memory, not 128 times.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41_jax import quant
from pallas_kernels.kv_write import lanes, reference
from pallas_kernels.kv_write.lanes import LANES
from pallas_kernels.kv_write.pieces import TILE, Pieces, Rows, first_use, load, store

RING_ROWS = 8  # rows of a ring that one copy can address


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
    size = reference.main_words(rows.d)
    word = rows.tiles(place) * size
    first_row, lane, kept = rows.tiles(page) * page_rows + word // LANES, word % LANES, rows.tiles(keep)
    # Two pieces for each entry: the row in which it begins, and the next one where it ends there.
    piece = jnp.stack([first_row, first_row + 1], axis=-1).reshape(rows.steps, 2 * rows.tile)
    used = jnp.stack([kept, kept & (lane + size > LANES)], axis=-1).reshape(piece.shape)
    latent, words = rows.call(
        functools.partial(_main_kernel, rows, size),
        [jnp.asarray(slot, jnp.int32).reshape(1), first_use(piece, used), piece.reshape(-1), lane.reshape(-1)],
        outputs=[rows.output(rows.width, raw.dtype)],
        pools=[words],
        scratch=[
            pltpu.VMEM((rows.tile, LANES), jnp.int32),
            pltpu.VMEM((2 * rows.tile + 1, 1, LANES), jnp.int32),
        ],
        name="main_entries",
        interpret=interpret,
    )
    return words, latent[: rows.n, : rows.d].reshape(raw.shape)


def _main_kernel(rows, size, slot, first, piece, lane, raw, norm, cos, sin, pool_in, latent, pool, words, buffer, sem):
    del pool_in  # the same memory as `pool`
    step = pl.program_id(0)
    pieces = Pieces(first, step, lambda i: pool.at[slot[0], pl.ds(piece[i], 1)], buffer, sem)
    pieces.start_reading()
    codes, scales = lanes.word_moves(rows.d, quant.MAIN_KV_BLOCK, size - rows.d // 8, rows.d // 8)

    def pack(chunk):
        normed = lanes.rms_norm(load(raw, chunk), load(norm), rows.d, rows.eps)
        store(latent, chunk, normed)
        turned = lanes.rotate(normed, load(cos, chunk), load(sin, chunk))
        quantised = [lanes.q4_main(column) for column in turned]
        packed = lanes.place([code for code, _ in quantised], codes)
        words[chunk] = packed | lanes.place([scale for _, scale in quantised], scales)

    rows.each_chunk(pack)
    pieces.wait()
    number = lanes.lane_numbers(1)

    def merge(i):
        begin = lane[step * rows.tile + i]
        entry = pltpu.roll(words[pl.ds(i, 1)], begin, 1)
        for part, low, high in ((0, begin, begin + size), (1, 0, begin + size - LANES)):
            at = pieces.buffer_of(2 * i + part)
            buffer[at] = jnp.where((number >= low) & (number < high), entry, buffer[at])

    rows.each_row(merge)
    pieces.write()


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
    page, place, kept = rows.tiles(page), rows.tiles(place), rows.tiles(keep)
    scale_row, scale_lane = reference.scale_place(page, place, page_entries, 1)
    scale_row = scale_row[..., 0]
    codes, scales = rows.call(
        functools.partial(_index_kernel, rows, page_entries),
        [
            jnp.asarray(slot, jnp.int32).reshape(1),
            first_use(page, kept),
            first_use(scale_row, kept),
            page.reshape(-1),
            scale_row.reshape(-1),
            place.reshape(-1),
            scale_lane.reshape(-1),
        ],
        outputs=[],
        pools=[codes, scales],
        scratch=[
            pltpu.VMEM((TILE, LANES), jnp.int32),
            pltpu.VMEM((LANES, TILE), jnp.int32),
            pltpu.VMEM((rows.tile + 1, *codes.shape[2:]), jnp.int32),
            pltpu.VMEM((rows.tile + 1, 1, LANES), jnp.int32),
        ],
        name="index_entries",
        interpret=interpret,
    )
    return codes, scales


def _index_kernel(
    rows, entries, slot, first, first_scale, page, scale_row, place, scale_lane, raw, norm, cos, sin, *refs
):
    _, _, codes, scales, words, turned, buffer, scale_buffer, sem, scale_sem = refs
    step = pl.program_id(0)
    pieces = Pieces(first, step, lambda i: codes.at[slot[0], page[i]], buffer, sem)
    scale_pieces = Pieces(
        first_scale, step, lambda i: scales.at[slot[0], pl.ds(scale_row[i], 1)], scale_buffer, scale_sem
    )
    pieces.start_reading()
    scale_pieces.start_reading()
    scale_word = LANES - 1  # of a row's words: the last lane is free
    code_moves, scale_moves = lanes.word_moves(rows.d, quant.BLOCK, 1, scale_word)

    def pack(chunk):
        normed = lanes.rms_norm(load(raw, chunk), load(norm), rows.d, rows.eps)
        (column,) = lanes.rotate(normed, load(cos, chunk), load(sin, chunk))
        code, scale = lanes.q4_index(column)
        words[chunk] = lanes.place([code], code_moves) | lanes.place([scale], scale_moves)

    rows.each_chunk(pack)
    turned[...] = words[...].T  # a word to a row, an entry of the tile to a lane
    pieces.wait()
    scale_pieces.wait()

    # Words side by side in a row of the page's tile: word `together` * row + m begins at lane m * entries.
    together = LANES // entries
    tile_rows = buffer.shape[1]
    number = lanes.lane_numbers(tile_rows)
    shift = entries.bit_length() - 1
    row = jax.lax.broadcasted_iota(jnp.int32, number.shape, 0)
    exists = row * together + (number >> shift) < rows.d // 8
    columns = [turned[pl.ds(m, tile_rows, stride=together)] for m in range(together)]
    scale_column = turned[pl.ds(scale_word, 1)]

    def merge(i):
        entry = step * rows.tile + i
        at = pieces.buffer_of(i)
        new = buffer[at]
        for m, column in enumerate(columns):
            lane = place[entry] + m * entries
            # `roll` takes no negative turn.
            new = jnp.where((number == lane) & exists, pltpu.roll(column, lane + LANES - i, 1), new)
        buffer[at] = new
        at, lane = scale_pieces.buffer_of(i), scale_lane[entry]
        moved = pltpu.roll(scale_column, lane + LANES - i, 1)
        scale_buffer[at] = jnp.where(lanes.lane_numbers(1) == lane, moved, scale_buffer[at])

    rows.each_row(merge)
    pieces.write()
    scale_pieces.write()


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
    ring_slot = rows.tiles((start[:, None] + i) % size)
    sequence = rows.tiles(jnp.broadcast_to(jnp.arange(b)[:, None], (b, t)))
    kept = rows.tiles(kept)
    own_codes, own_scales, codes, scales = rows.call(
        functools.partial(_window_kernel, rows, piece_rows),
        [
            jnp.asarray(layer, jnp.int32).reshape(1),
            first_use(sequence * size + ring_slot // piece_rows, kept),
            first_use(sequence, kept),
            sequence.reshape(-1),
            ring_slot.reshape(-1),
        ],
        outputs=[rows.output(rows.width, jnp.uint8), rows.output(LANES, jnp.int32)],
        pools=[codes, scales],
        scratch=[
            pltpu.VMEM((TILE, rows.width), jnp.int32),
            pltpu.VMEM((TILE, LANES), jnp.int32),
            pltpu.VMEM((LANES, TILE), jnp.int32),
            pltpu.VMEM((rows.tile + 1, piece_rows, d), jnp.uint8),
            pltpu.VMEM((rows.tile + 1, d // quant.BLOCK, size), jnp.uint8),
        ],
        name="window_rows",
        interpret=interpret,
    )
    own_codes = own_codes[: rows.n, :d].reshape(b, t, d)
    own_scales = own_scales[: rows.n, : d // quant.BLOCK].reshape(b, t, -1).swapaxes(1, 2).astype(jnp.uint8)
    return codes, scales, own_codes, own_scales


def _window_kernel(rows, piece_rows, layer, first, first_scale, sequence, ring_slot, raw, norm, cos, sin, *refs):
    _, _, own, own_scales, codes, scales, rows_i32, words, turned, buffer, scale_buffer, sem, scale_sem = refs
    step = pl.program_id(0)

    def ring_piece(i):
        at = ring_slot[i] // piece_rows * piece_rows
        return codes.at[layer[0], sequence[i], pl.ds(pl.multiple_of(at, piece_rows), piece_rows)]

    pieces = Pieces(first, step, ring_piece, buffer, sem)
    scale_pieces = Pieces(first_scale, step, lambda i: scales.at[layer[0], sequence[i]], scale_buffer, scale_sem)
    pieces.start_reading()
    scale_pieces.start_reading()
    blocks = rows.d // quant.BLOCK
    scale_moves = [(g * quant.BLOCK, 1, 0, g) for g in range(blocks)]

    def quantise(chunk):
        normed = lanes.rms_norm(load(raw, chunk), load(norm), rows.d, rows.eps)
        quantised = [lanes.q8(column) for column in lanes.rotate(normed, load(cos, chunk), load(sin, chunk))]
        store(rows_i32, chunk, [code for code, _ in quantised])
        store(own, chunk, [code for code, _ in quantised])
        words[chunk] = lanes.place([scale for _, scale in quantised], scale_moves)

    rows.each_chunk(quantise)
    own_scales[...] = words[: rows.tile]
    turned[...] = words[...].T  # a scale to a row, a row of the tile to a lane
    pieces.wait()
    scale_pieces.wait()
    inside = jax.lax.broadcasted_iota(jnp.int32, (piece_rows, rows.d), 0)
    ring = scale_buffer.shape[2]
    column = turned[:blocks]

    def merge(i):
        at, where = pieces.buffer_of(i), ring_slot[step * rows.tile + i]
        new = rows_i32[pl.ds(i, 1)][:, : rows.d]
        old = buffer[at].astype(jnp.int32)
        buffer[at] = jnp.where(inside == where % piece_rows, new, old).astype(jnp.uint8)
        at = scale_pieces.buffer_of(i)
        new = pltpu.roll(column, (where + TILE - i) % LANES, 1)
        new = jnp.concatenate([new] * -(-ring // LANES), axis=1)[:, :ring]
        slots = jax.lax.broadcasted_iota(jnp.int32, (blocks, ring), 1)
        old = scale_buffer[at].astype(jnp.int32)
        scale_buffer[at] = jnp.where(slots == where, new, old).astype(jnp.uint8)

    rows.each_row(merge)
    pieces.write()
    scale_pieces.write()
