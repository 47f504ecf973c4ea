"""Recordings of CED prefill and encoder replay of tiny model A, and how far a model is from them.

The tests look inside every layer, so one step program (unrolled, with image inputs, one row of two) serves them all:
prompts, prefixes, images, decoding, and any pieces a prompt is read in, since a piece may be shorter than its block.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import dsv41_jax as ds
from dsv41_jax import ced, model, runner
from dsv41_jax.cache import Cache, put_rows, take_rows
from dsv41_jax.layer_plan import sources_of_ratio
from tiny_golden import image_inputs, prompt, recording

# Length of the prefix: lengths of the prompt.
REPLAYS = dict.fromkeys((17, 32, 33, 63, 64, 100, 101), (140, 200)) | {130: (140,), 139: (140,)}
BLOCK = 64  # longer than a ring, which holds 32 rows
MAX_LEN = 256
DECODER = 6


@functools.partial(jax.jit, static_argnames=("config", "numerics", "layers", "all_logits"), donate_argnames=("arrays",))
def _recorded(params, arrays, row, *inputs, config, numerics, layers, all_logits):
    """As the step of `runner`, for one row, with the layers' selections and outputs."""
    ids, start, n_valid, floor, memory, mask, embeds = inputs
    notes = {}
    step = functools.partial(model.extend, config, numerics, params, layers=layers, all_logits=all_logits)
    logits, own = step(take_rows(arrays, row), ids, start, n_valid, memory, mask, embeds, floor, record=notes)
    kept = {(name, i): note[name] for i, note in notes.items() for name in ("selection", "block_out") if name in note}
    return logits, put_rows(arrays, own, row), kept


class Watch:
    """Stands in for the step of `runner` and keeps what it saw: {(name, layer, row): {position: value}}."""

    def __init__(self):
        self.seen: dict[tuple[str, int, int], dict[int, np.ndarray]] = {}

    def __call__(self, params, arrays, row, ids, start, n_valid, floor, memory, mask, embeds, **static):
        static = {name: static[name] for name in ("config", "numerics", "layers", "all_logits")}  # no mesh here
        if mask is None:  # text runs the program of images
            mask = jnp.zeros(ids.shape, bool)
            embeds = jnp.zeros((*ids.shape, static["config"].hidden_size), static["numerics"].dtype)
        first, count = int(start[0]), int(n_valid[0])
        logits, arrays, kept = _recorded(
            params, arrays, row, ids, start, n_valid, floor, memory, mask, embeds, **static
        )
        for (name, layer), value in kept.items():
            rows = self.seen.setdefault((name, layer, int(row)), {})
            rows.update({first + i: v for i, v in enumerate(np.asarray(value)[0, :count])})
        return logits, arrays

    def values(self, name: str, layer: int, row: int, first: int, stop: int) -> np.ndarray:
        """The newest values at positions first .. stop - 1."""
        return np.stack([self.seen[name, layer, row][p] for p in range(first, stop)])


def cut(monkeypatch, sizes: Sequence[int]) -> None:
    """Let prompts be read in pieces of these sizes, again and again."""
    blocks = ced.Reading.blocks

    def pieces(self, size):
        lengths = itertools.cycle(sizes)
        for layers, at, stop in blocks(self, size):
            while at < stop:
                end = min(at + next(lengths), stop)
                yield layers, at, end
                at = end

    monkeypatch.setattr(ced.Reading, "blocks", pieces)


def watched(loaded: ds.Model, monkeypatch) -> Watch:
    """Let the model run the one program of these tests."""
    watch = Watch()
    monkeypatch.setattr(runner, "_extend", watch)
    monkeypatch.setattr(loaded._runner, "prefill_block", BLOCK)
    return watch


def case_ids(case: str) -> np.ndarray:
    """Token ids int32 [n] of a case; "lenN": the first N tokens of the long prompt."""
    return prompt("long")[0, : int(case[3:])] if case.startswith("len") else prompt(case)[0]


def prefill(loaded: ds.Model, cases: Sequence[str], mode: str = "ced") -> tuple[np.ndarray, Cache]:
    """All logits [B, T, V] of a batch of cases, and the cache."""
    prompts = [case_ids(case) for case in cases]
    lengths = np.array([len(p) for p in prompts])
    ids = np.stack([np.pad(p, (0, lengths.max() - len(p)), constant_values=2) for p in prompts])
    images = [image_inputs() if case == "image" else [] for case in cases]
    logits, cache = loaded.prefill(ids, lengths, mode, images, MAX_LEN, all_logits=True)
    return np.asarray(logits), cache


def feed(loaded: ds.Model, cache: Cache, tokens: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], Cache]:
    """Feed the next tokens of each row, any number: logits [tokens, V] of each row."""
    n_valid = np.array([len(row) for row in tokens], np.int32)
    block = np.full((len(tokens), BLOCK), 2, np.int32)
    for row, ids in enumerate(tokens):
        block[row, : len(ids)] = ids
    logits, cache = loaded._runner.extend(cache, block, n_valid, all_logits=True)
    return [np.asarray(logits)[row, :n] for row, n in enumerate(n_valid)], cache


def entries(loaded: ds.Model, cache: Cache, row: int, source: int) -> tuple[np.ndarray, np.ndarray]:
    """Main KV [N, d] and index keys [N, di] of a row so far, read through its page table (unpacked numerics)."""
    ratio, arrays = loaded.config.compress_ratios[source], cache.peek()
    slot = sources_of_ratio(loaded.config, ratio).index(source)
    table, count = np.asarray(arrays.page_table)[row], int(cache.lengths[row]) // ratio
    pools = (np.asarray(pool[f"r{ratio}"]["rows"])[slot] for pool in (arrays.main_kv, arrays.index_key))
    return tuple(pool[table].reshape(-1, pool.shape[-1])[:count] for pool in pools)


def page_bytes(cache: Cache, pages: Sequence[int]) -> list[bytes]:
    """What stands in pages of all pools (unpacked numerics)."""
    arrays = cache.peek()
    return [np.asarray(leaf)[:, pages].tobytes() for leaf in jax.tree.leaves((arrays.main_kv, arrays.index_key))]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference; infinite where shapes differ or a number is missing."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.nan_to_num(np.abs(a - b), nan=np.inf).max()) if a.shape == b.shape else np.inf


def differ(a: np.ndarray, b: np.ndarray) -> float:
    """How many numbers are not equal."""
    return float(np.sum(np.asarray(a) != b)) if np.shape(a) == np.shape(b) else np.inf


def draft_distances(loaded: ds.Model, cache: Cache, keys: Sequence[str | None]) -> dict[str, float]:
    """Distances of a draft round from the recordings under `keys`, one a row (None: not compared)."""
    g, found = recording("ced"), {}
    anchors = [5 if key is None else int(g[f"{key}.decode_tokens"][0]) for key in keys]
    tokens, logits, confidence = loaded.draft(cache, np.array(anchors, np.int32))
    for row, key in enumerate(keys):
        if key is not None:
            found[f"{key}.draft tokens"] = differ(tokens[row], g[f"{key}.dspark_tokens"])
            found[f"{key}.draft logits"] = distance(logits[row], g[f"{key}.dspark_logits"])
            found[f"{key}.draft confidence"] = distance(confidence[row], g[f"{key}.dspark_confidence"])
    return found


def ced_distances(
    loaded: ds.Model, watch: Watch | None, cases: Sequence[str], then: Callable[[Cache], Cache] = lambda c: c
) -> dict[str, float]:
    """Read a batch of cases, draft, decode: distances from the recordings by name.

    Args:
        watch: to compare selections. then: applied to the cache between the prompt and what follows.
    """
    g, found = recording("ced"), {}
    logits, cache = prefill(loaded, cases)
    keys = [f"ced.{case}" for case in cases]
    for row, key in enumerate(keys):
        n, width = int(cache.lengths[row]), len(g[f"{key}.logits"])
        found[f"{key}.logits"] = distance(logits[row, n - width : n], g[f"{key}.logits"])
        found[f"{key}.unseen"] = float(np.isfinite(logits[row, : n - width]).sum())
        for layer in (6, 8) if watch else ():
            chosen = watch.values("selection", layer, row, n - width, n)
            found[f"{key}.topk.{layer}"] = differ(chosen, g[f"{key}.topk.{layer}"])
    cache = then(cache)
    found |= draft_distances(loaded, cache, keys)
    after, _ = feed(loaded, cache, [g[f"{key}.decode_tokens"][:-1] for key in keys])
    for key, row in zip(keys, after, strict=True):
        found[f"{key}.decode"] = distance(row, g[f"{key}.decode_logits"])
        found[f"{key}.greedy"] = differ(row.argmax(-1), g[f"{key}.decode_tokens"][1:])
    return found


def donor(loaded: ds.Model, hit: int) -> Cache:
    """A cache of two rows; the first has read the prefix and something else after it, the second one token."""
    ids = prompt("long")[:, : hit + 5].repeat(2, axis=0)
    ids[0, hit:] = (ids[0, hit:] + 7) % 490
    return loaded.prefill(ids, [ids.shape[1], 1], "ced", max_len=MAX_LEN, all_logits=True)[1]


def replay_distances(
    loaded: ds.Model,
    watch: Watch | None,
    hit: int,
    lengths: Sequence[int],
    cache: Cache | None = None,
    pages: Sequence[int] | None = None,
) -> dict[str, float]:
    """Resume the second row after a prefix, for prompts of these lengths one after the other, and go on each time.

    Args:
        watch: to compare block outputs. cache: see `donor`. pages: of the prefix (default: the donor's).
    """
    g, config, found = recording("ced"), loaded.config, {}
    cache = donor(loaded, hit) if cache is None else cache
    pages = cache.pages(0)[: -(-hit // 128)] if pages is None else pages
    for n in lengths:
        key, before = f"replay.h{hit}.n{n}", page_bytes(cache, pages)
        logits, cache = loaded.resume(cache, 1, pages, hit, prompt("long")[0, :n], all_logits=True)
        found[f"{key}.logits"] = distance(np.asarray(logits)[-1], g[f"{key}.logits"])
        found[f"{key}.pages"] = float(page_bytes(cache, pages) != before)
        for source in config.kv_source_layer_ids:
            group = hit // config.compress_ratios[source]
            for name, stored in zip(("main_kv", "index_key"), entries(loaded, cache, 1, source), strict=True):
                expected = g[f"replay.h{hit}.{name}.{source}"]
                found[f"{key}.{name}.{source}.kept"] = distance(stored[group - 1], expected[0])
                found[f"{key}.{name}.{source}.new"] = distance(stored[group : group + 1], expected[1:])
        if watch:
            streams = [watch.values("block_out", layer, 1, hit, hit + 1)[0] for layer in range(DECODER)]
            found[f"{key}.block_out"] = distance(np.stack(streams), g[f"replay.h{hit}.block_out"])
        found |= draft_distances(loaded, cache, [None, key])
        (_, after), cache = feed(loaded, cache, [[], g[f"{key}.decode_tokens"][:-1]])
        found[f"{key}.decode"] = distance(after, g[f"{key}.decode_logits"])
        found[f"{key}.greedy"] = differ(after.argmax(-1), g[f"{key}.decode_tokens"][1:])
    return found
