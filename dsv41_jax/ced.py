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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dsv41_jax import sharded_step, sharding
from dsv41_jax.cache import Cache, CacheArrays, pages_for
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_input import ImageInput
from dsv41_jax.layer_plan import source_ratios
from dsv41_jax.numerics import Numerics
from dsv41_jax.pages import PAGE_TOKENS, PageLayout
from dsv41_jax.prompt_reading import Prompt, Reading, RowWork, prompts_of, read_rows
from dsv41_jax.runner import Runner

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
    window_floors = np.stack([np.zeros_like(floor), floor])
    prompts = prompts_of(runner, token_ids, lengths, images)
    work = {row: RowWork(*both) for row, both in enumerate(zip(prompts, readings, strict=True))}
    logits, arrays = read_rows(runner, cache, work, all_logits)
    history = cache.history
    if history is not None:
        history[:] = [history_after(runner, prompt) for prompt in prompts]
    lengths = np.asarray(lengths, np.int32)
    cache = dataclasses.replace(
        cache, arrays=arrays, lengths=lengths, written=lengths, floor=floor, window_floors=window_floors
    )
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
        prefix_pages: page ids of tokens 0 .. hit - 1, as `Cache.pages` gives them: ceil(hit / 128) of them, on the
            device that holds the row.
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
    device, pool = cache.device_of(row), cache.pages_of_device
    prefix, shared = [int(p) - device * pool for p in prefix_pages], hit // PAGE_TOKENS
    if len(prefix) != pages_for(hit):
        raise ValueError(f"a prefix of {hit} tokens has {pages_for(hit)} pages, {len(prefix)} are given")
    tables = cache.tables.copy()
    neighbours = [other for other in range(len(tables)) if other != row and cache.device_of(other) == device]
    rest = tables.shape[1] - shared
    present, others = tables[row].tolist(), set(tables[neighbours].ravel().tolist())
    if own_pages is None:
        open_page = [p for p in prefix[shared:] if p in present and p not in others]
        free = [p for p in dict.fromkeys([*present, *range(pool)]) if p not in others | set(prefix)]
        own_pages = open_page + free
    else:
        own_pages = [int(p) - device * pool for p in own_pages]
    own = own_pages[:rest]
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
            f"pages {list(map(int, prefix_pages))} of the prefix and {[p + device * pool for p in own]} for the rest: "
            f"each must be one of the {pool} pages from {device * pool} on (those of the device that holds row {row}) "
            "and be named once, and those for the rest by no other row"
        )
    # A row that wrote the shared pages, or shares them too, will not write them again.
    sharing = {other: _shared_tokens(tables[other], prefix[:shared]) for other in neighbours}
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
    window_floors = cache.window_floors.copy()
    window_floors[:, row] = reading.begin, reading.split
    arrays = cache.take()
    rows = len(arrays.encoder_floor)
    if hit % PAGE_TOKENS and not in_place:
        copied = np.zeros((2, runner.row_shards), np.int32)  # other devices copy their page 0 onto itself
        copied[:, row // (rows // runner.row_shards)] = prefix[-1], own[0]
        source, target = (runner.put(x, runner.row_shards) for x in copied)
        static = {"config": config, "numerics": runner.numerics, "mesh": runner.mesh}
        arrays = _copy_page(arrays, source, target, **static)
    arrays = arrays.replace(
        page_table=runner.put(tables, rows),
        encoder_floor=runner.put(window_floors[0], rows),
        decoder_floor=runner.put(window_floors[1], rows),
    )
    cache = dataclasses.replace(cache, arrays=arrays, tables=tables, window_floors=window_floors)
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


@functools.partial(jax.jit, static_argnames=("config", "numerics", "mesh"), donate_argnames=("arrays",))
def _copy_page(
    arrays: CacheArrays, source: Array, target: Array, *, config: ModelConfig, numerics: Numerics, mesh: Mesh | None
) -> CacheArrays:
    """Every device copies its page source[i] over its page target[i]."""

    def copy(main_kv: dict, index_key: dict, source: Array, target: Array) -> tuple[dict, dict]:
        main_kv, index_key = dict(main_kv), dict(index_key)
        for ratio in source_ratios(config):
            name, layout = f"r{ratio}", PageLayout.of(config, numerics, ratio)
            main_kv[name], index_key[name] = layout.copy_page(main_kv[name], index_key[name], source[0], target[0])
        return main_kv, index_key

    if mesh is not None:
        specs = sharding.cache_specs(arrays, sharding.layout_of(mesh))
        pools, rows = (specs.main_kv, specs.index_key), sharded_step.ROWS
        copy = jax.shard_map(copy, mesh=mesh, in_specs=(*pools, rows, rows), out_specs=pools, check_vma=False)
    main_kv, index_key = copy(arrays.main_kv, arrays.index_key, source, target)
    return arrays.replace(main_kv=main_kv, index_key=index_key)
