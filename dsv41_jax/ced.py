"""The phases of reading a prompt: exact prefill, encoder-only prefill (CED), and replay after a prefix that is cached.

The decoder is every layer from the last KV source on. With a window of W tokens and a prompt of n:

    exact   all layers on all tokens
    ced     the encoder and the hand-over (the last source's entries) on [0, n - W), all layers on [n - W, n); the
            decoder's windows begin at n - W. A prompt of at most W tokens is exact
    resume  after h > W tokens whose pages are kept: as ced, from h - W on. The encoder's windows begin there, and
            entries wholly before h are read, never written

Decode and verify are `Runner.extend` with one token, or several. Any split into blocks gives the same state.
Source: report 3.2.2.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.cache import Cache, CacheArrays, pages_for
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_input import ImageInput, prompt_token_types
from dsv41_jax.image_plan import TokenType
from dsv41_jax.layer_plan import source_ratios
from dsv41_jax.numerics import Numerics
from dsv41_jax.pages import PAGE_TOKENS, PageLayout
from dsv41_jax.runner import Runner
from dsv41_jax.vision import merge_images

PREFILL_MODES = ("ced", "exact")


def check_mode(mode: str, config: ModelConfig) -> None:
    """ValueError for an unknown prefill mode, or for "ced" with a layer map that has no such split."""
    if mode not in PREFILL_MODES:
        raise ValueError(f"prefill mode {mode!r} is unknown; choose one of {', '.join(PREFILL_MODES)}")
    if mode == "ced" and not config.supports_ced:
        raise ValueError(
            "this model has no encoder-only prefill: it needs a KV source and no Engram layer from the last one on; "
            'use the mode "exact"'
        )


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


def prefill(
    runner: Runner,
    token_ids: np.ndarray,
    lengths: np.ndarray,
    images: Sequence[Sequence[ImageInput]],
    max_len: int,
    mode: str,
    all_logits: bool,
) -> tuple[Array, Cache]:
    """Read prompts into a new cache.

    Returns:
        logits float32 [B, V] at each row's last token, or [B, T, V] (NaN where there are none: past a row's length, and
        in "ced" mode at tokens that only the encoder has seen); and the cache.
    """
    config, (batch, longest) = runner.config, token_ids.shape
    cache = runner.new_cache(batch, max_len)
    readings = [Reading.of(config, mode, int(n)) for n in lengths]
    floor = np.array([reading.split for reading in readings], np.int32)
    rows = len(cache.arrays.decoder_floor)
    cache.arrays = cache.arrays.replace(decoder_floor=runner.put(floor, rows))
    prompts = prompts_of(runner, token_ids, lengths, images)
    work = {row: RowWork(*both) for row, both in enumerate(zip(prompts, readings, strict=True))}
    logits, arrays = read_rows(runner, cache, work, all_logits)
    history = cache.history
    if history is not None:
        history[:] = [history_after(runner, prompt) for prompt in prompts]
    lengths = np.asarray(lengths, np.int32)
    cache = dataclasses.replace(cache, arrays=arrays, lengths=lengths, written=lengths, floor=floor)
    if all_logits:
        everything = np.full((batch, longest, config.vocab_size), np.nan, np.float32)
        for row, reading in enumerate(readings):
            everything[row, reading.split : reading.end] = logits[row]
        return jax.device_put(everything), cache  # jnp.asarray would compile a copy for every shape
    last = [logits[row] for row in range(batch)]
    return (last[0] if batch == 1 else jnp.concatenate(last)), cache


def history_after(runner: Runner, prompt: Prompt) -> np.ndarray:
    """Compressed ids int64 [H] of a prompt's last tokens, for the n-grams that come after it."""
    empty = runner.empty_history(1)
    mask = None if prompt.image_mask is None else prompt.image_mask[None]
    joined = np.concatenate([empty, runner.hasher.compress(prompt.ids[None], mask)], axis=1)
    return joined[0, -empty.shape[1] :]


def resume(
    runner: Runner,
    cache: Cache,
    row: int,
    prefix_pages: Sequence[int],
    hit: int,
    token_ids: np.ndarray,
    images: Sequence[ImageInput] = (),
    own_pages: Sequence[int] | None = None,
    all_logits: bool = False,
) -> tuple[Array, Cache]:
    """Start a row of the cache anew with a prompt whose first `hit` tokens have their pages: encoder replay, then the
    rest.

    Pages wholly inside the prefix are shared and stay as they are, bit for bit; one that the prefix fills in part is
    copied first. Windows, pending compressor rows and the id history of the prefix are made again from the last W
    tokens before `hit`, approximately for the windows (by design of the model), exactly for the rest.

    Args:
        cache: spent. row: the row that is overwritten.
        prefix_pages: page ids of tokens 0 .. hit - 1: ceil(hit / 128) of them.
        token_ids: int32 [n], the whole prompt, prefix included; n > hit. images: those of the prompt.
        own_pages: pages for the rest of the row up to max_len, in order; default: those that neither the prefix nor
            another row names, the row's present ones first. If the prefix fills its last page in part, that page may be
            the first of them: it is then written on instead of copied (the default where no other row names it and it
            is the row's own).

    Returns:
        logits float32 [1, V] at the last token (or [W, V] of the tokens that all layers saw), and the cache.

    Raises:
        ValueError: a hit of at most W tokens or not shorter than the prompt, a row or a prompt that the cache has no
            room for, too few pages, or one that is named twice or does not exist. The cache is not spent then.
    """
    config, n = runner.config, len(token_ids)
    check_mode("ced", config)
    if runner.mesh is not None:
        raise ValueError("resume: adopting a prefix is not part of this version on a mesh; prefill the whole prompt")
    width = config.sliding_window
    if not width < hit < n:
        raise ValueError(
            f"hit={hit}: a prefix is adopted when it is longer than the window of {width} and shorter than the prompt "
            f"of {n} tokens"
        )
    if not 0 <= row < len(cache.lengths):
        raise ValueError(f"row={row}: the cache has {len(cache.lengths)} rows")
    if n > cache.max_len:
        raise ValueError(f"a prompt of {n} tokens does not fit the cache: it holds max_len={cache.max_len} a row")
    prefix, shared = [int(p) for p in prefix_pages], hit // PAGE_TOKENS
    if len(prefix) != pages_for(hit):
        raise ValueError(f"a prefix of {hit} tokens has {pages_for(hit)} pages, {len(prefix)} are given")
    tables = np.array(cache.peek().page_table)
    pool, rest = jax.tree.leaves(cache.peek().index_key)[0].shape[1], tables.shape[1] - shared
    present, others = tables[row].tolist(), set(np.delete(tables, row, axis=0).ravel().tolist())
    if own_pages is None:
        open_page = [p for p in prefix[shared:] if p in present and p not in others]
        free = [p for p in dict.fromkeys([*present, *range(pool)]) if p not in others | set(prefix)]
        own_pages = open_page + free
    own = [int(p) for p in own_pages][:rest]
    # Whether the page that the prefix fills in part is written on.
    in_place = hit % PAGE_TOKENS > 0 and own[:1] == prefix[-1:] and own[0] not in others
    if len(own) < rest:
        raise ValueError(
            f"{rest} pages that are not the prefix's are needed for the rest of the row (max_len={cache.max_len}), "
            f"got {own}"
        )
    named = prefix[:shared] + own if in_place else prefix + own
    if len(set(named)) < len(named) or not all(0 <= p < pool for p in named) or others & set(own):
        raise ValueError(
            f"pages {prefix} of the prefix and {own} for the rest: each must be one of the cache's {pool} pages and be "
            "named once, and those for the rest by no other row"
        )
    # A row that wrote the shared pages, or shares them too, will not write them again.
    sharing = {other: _shared_tokens(tables[other], prefix[:shared]) for other in range(len(tables)) if other != row}
    for other, tokens in sharing.items():
        if cache.lengths[other] < tokens:
            raise ValueError(
                f"row {other} names {tokens} tokens of the prefix's pages and is at length {cache.lengths[other]}: it "
                "would write them again. Start that row anew first, or adopt a shorter prefix"
            )
    table = prefix[:shared] + own
    [prompt] = prompts_of(runner, np.asarray(token_ids)[None], np.array([n]), [list(images)])
    reading = Reading.of(config, "ced", n, hit)
    tables[row] = table
    floors = [np.array(x) for x in (cache.arrays.encoder_floor, cache.arrays.decoder_floor)]
    floors[0][row], floors[1][row] = reading.begin, reading.split
    arrays = cache.take()
    if hit % PAGE_TOKENS and not in_place:
        arrays = _copy_page(arrays, jnp.int32(prefix[-1]), jnp.int32(own[0]), config=config, numerics=runner.numerics)
    arrays = arrays.replace(
        page_table=jnp.asarray(tables), encoder_floor=jnp.asarray(floors[0]), decoder_floor=jnp.asarray(floors[1])
    )
    cache = dataclasses.replace(cache, arrays=arrays)
    logits, arrays = read_rows(runner, cache, {row: RowWork(prompt, reading, hit)}, all_logits)
    lengths, written, history = cache.lengths.copy(), cache.written.copy(), cache.history
    lengths[row] = written[row] = n
    floor = cache.floor.copy()
    floor[row] = max(hit, reading.split)
    for other, tokens in sharing.items():
        floor[other] = max(floor[other], tokens)
    if history is not None:
        history = history.copy()
        history[row] = history_after(runner, prompt)
    return logits[row], dataclasses.replace(
        cache, arrays=arrays, lengths=lengths, written=written, history=history, floor=floor
    )


def _shared_tokens(table: np.ndarray, pages: list[int]) -> int:
    """How many tokens of a row are in the first of these pages."""
    return int(np.cumprod(table[: len(pages)] == pages).sum()) * PAGE_TOKENS


@functools.partial(jax.jit, static_argnames=("config", "numerics"), donate_argnames=("arrays",))
def _copy_page(arrays: CacheArrays, source: Array, target: Array, *, config: ModelConfig, numerics: Numerics):
    main_kv, index_key = dict(arrays.main_kv), dict(arrays.index_key)
    for ratio in source_ratios(config):
        name, layout = f"r{ratio}", PageLayout.of(config, numerics, ratio)
        main_kv[name], index_key[name] = layout.copy_page(main_kv[name], index_key[name], source, target)
    return arrays.replace(main_kv=main_kv, index_key=index_key)
