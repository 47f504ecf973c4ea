"""CED prefill and encoder replay: against recordings, against the slow oracle, and with mistakes put in."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41_jax as ds
from ced_golden import (
    DECODER,
    REPLAYS,
    ced_distances,
    cut,
    distance,
    donor,
    entries,
    feed,
    page_bytes,
    prefill,
    replay_distances,
    watched,
)
from dsv41_jax import ced
from dsv41_jax.cache import Cache, pages_for
from dsv41_jax.runner import Runner
from launch.eval_demo import held_out_contexts
from oracle_ced import CedOracle
from oracle_weights import dequantise, read_safetensors
from random_configs import random_legal_config
from random_models import random_token_map, write_model
from tiny_golden import FLOAT32_ATOL as ATOL
from tiny_golden import GOLDEN, image_inputs, prompt, recording

CLEARLY = 10 * ATOL  # a mistake moves something by more


@pytest.fixture
def model(tiny) -> ds.Model:
    return tiny("float32")


@pytest.fixture
def watch(model, monkeypatch):
    return watched(model, monkeypatch)


def assert_close(found: dict[str, float]) -> None:
    wrong = {name: value for name, value in found.items() if not value <= ATOL}
    assert found and not wrong


# --- recordings ------------------------------------------------------------------------------------------------------

PAIRS = (("long", "mid"), ("len16", "len17"), ("len33", "image"))  # of `image`, n - W stands inside an image
RAGGED = (1, 17, 3, 30)


@pytest.mark.parametrize("cases", PAIRS, ids="-".join)
def test_ced_prefill(model, watch, cases):
    assert_close(ced_distances(model, watch, cases))


@pytest.mark.parametrize(("cases", "sizes"), [(("mid", "len33"), (5,)), (("long", "image"), RAGGED)], ids=str)
def test_ced_prefill_in_other_pieces(model, watch, monkeypatch, cases, sizes):
    cut(monkeypatch, sizes)
    assert_close(ced_distances(model, watch, cases))


@pytest.mark.parametrize("hit", REPLAYS)
def test_replay(model, watch, hit):
    assert_close(replay_distances(model, watch, hit, REPLAYS[hit]))


@pytest.mark.parametrize(("hit", "sizes"), [(33, (5,)), (101, RAGGED), (130, (1,)), (139, (5,))], ids=str)
def test_replay_in_other_pieces(model, watch, monkeypatch, hit, sizes):
    cache = donor(model, hit)
    cut(monkeypatch, sizes)
    assert_close(replay_distances(model, watch, hit, (140,), cache))


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 5, 16])
def test_blocks_of_other_lengths(model, monkeypatch, block):
    """The programs that users run, rolled up, with blocks shorter than the window and as long."""
    monkeypatch.setattr(model._runner, "prefill_block", block)
    for cases in PAIRS:
        assert_close(ced_distances(model, None, cases))
    for hit in (17, 100, 101, 130, 139):
        assert_close(replay_distances(model, None, hit, REPLAYS[hit]))


def test_a_prompt_within_the_window_is_exact(model, watch):
    """Bit for bit, logits and state."""
    for cases in (("len16", "len5"), ("len1", "len2")):
        (logits, cache), (exact, other) = (prefill(model, cases, mode) for mode in ("ced", "exact"))
        assert logits.tobytes() == exact.tobytes()
        for a, b in zip(jax.tree.leaves(cache.arrays), jax.tree.leaves(other.arrays), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- the slow oracle -------------------------------------------------------------------------------------------------

MARGIN = 1e-5  # a smaller score gap may fall the other way in float32


@pytest.fixture(scope="module")
def tiny_oracle() -> CedOracle:
    config = json.loads((GOLDEN / "tinyA_config.json").read_text())
    weights = dequantise(read_safetensors(GOLDEN / "tinyA_model.safetensors"))
    return CedOracle(config, weights, np.load(GOLDEN / "tinyA_token_map.npz")["token_map"])


def test_the_oracle_gives_the_recorded_numbers(tiny_oracle):
    g, ids = recording("ced"), prompt("long")[0]
    kept = tiny_oracle.read(np.concatenate([ids, g["ced.long.decode_tokens"][:-1]]), 200)
    for name in ("logits", "decode_logits"):
        part = slice(0, 16) if name == "logits" else slice(16, None)
        assert distance(kept["logits"][part], g[f"ced.long.{name}"]) < 1e-6
    for layer in (6, 8):
        np.testing.assert_array_equal(kept["topk"][layer][:16], g[f"ced.long.topk.{layer}"])
    draft = tiny_oracle.draft(kept, 199, int(g["ced.long.decode_tokens"][0]))
    assert distance(draft["logits"], g["ced.long.dspark_logits"]) < 1e-6
    for hit, n in ((33, 140), (139, 140)):
        key = f"replay.h{hit}"
        read = tiny_oracle.read(np.concatenate([ids[:n], g[f"{key}.n{n}.decode_tokens"][:-1]]), n, hit, kept)
        assert distance(read["logits"][15], g[f"{key}.n{n}.logits"]) < 1e-6
        assert distance(read["logits"][16:], g[f"{key}.n{n}.decode_logits"]) < 1e-6
        at = hit - read["begin"]
        assert distance([read["block_out"][i][at] for i in range(DECODER)], g[f"{key}.block_out"]) < 1e-6
        for source, group in ((2, hit // 2), (4, hit // 2), (6, hit)):
            for name in ("main_kv", "index_key"):
                assert distance(read[name][source][group - 1 : group + 1], g[f"{key}.{name}.{source}"]) < 1e-6


@pytest.mark.parametrize("hit", [26, 27])
def test_a_prefix_that_ends_inside_an_image(model, watch, tiny_oracle, hit):
    """So do the replayed tokens begin, and the tokens that all layers see; image and text go on after the prefix."""
    g, ids = recording("image"), prompt("image")[0]
    types = g["token_types"]
    assert types[hit - 1] >= 0 and types[hit] >= 0 and types[hit - 17] >= 0 and types[hit - 16] >= 0
    pixels = np.concatenate([g["fp32.image0.aligner"], g["fp32.image1.aligner"]])
    kept = tiny_oracle.read(ids, len(ids), 0, None, pixels, types)
    read = tiny_oracle.read(ids, len(ids), hit, kept, pixels, types)
    assert min(kept["margin"], read["margin"]) > MARGIN
    _, cache = prefill(model, ("image", "len1"))
    before = page_bytes(cache, [0])
    logits, cache = model.resume(cache, 1, [0], hit, ids, image_inputs(), all_logits=True)
    assert distance(logits, read["logits"]) <= ATOL
    assert page_bytes(cache, [0]) == before
    for source in model.config.kv_source_layer_ids:
        for name, stored in zip(("main_kv", "index_key"), entries(model, cache, 1, source), strict=True):
            assert distance(stored, read[name][source]) <= ATOL


# Seed of the model, seed of the tokens: no choice is close. Both models have Engram, a candidate pool and a source of
# each ratio; the pairs are handed over to the decoder in the first, and the encoder's in the second.
SMALL = {55: 3, 47: 18}
SMALL_LEN = 384
EDGES = {127: 128, 128: 131, 129: 149, 255: 257, 256: 271, 257: 297}  # length of the prefix: length of the prompt


@pytest.fixture(scope="module", params=[55, pytest.param(47, marks=pytest.mark.slow)])
def small(request, tmp_path_factory):
    """A random model, its oracle, tokens, and what the oracle makes of them without a prefix."""
    seed, folder = request.param, tmp_path_factory.mktemp("ced") / "model"
    config, token_map = random_legal_config(seed), random_token_map(random_legal_config(seed), seed)
    config["text_config"]["max_position_embeddings"] = 512
    oracle = CedOracle(config, dequantise(write_model(folder, config, seed)), token_map)
    loaded = ds.load(folder, numerics="float32", token_map=token_map)
    ids = np.random.default_rng(SMALL[seed]).integers(3, loaded.config.vocab_size, 300).astype(np.int32)
    return SimpleNamespace(model=loaded, oracle=oracle, ids=ids, kept=oracle.read(ids, len(ids)))


def small_donor(small, hit: int) -> tuple[np.ndarray, Cache]:
    """Tokens that share `hit` with the prompt and go on differently, and a cache whose first row has read them."""
    vocabulary = small.model.config.vocab_size
    ids = np.concatenate([small.ids[:hit], 3 + (small.ids[hit : hit + 8] + 1) % (vocabulary - 3)])
    both = np.stack([ids, ids])[:, : hit + 5]
    return ids, small.model.prefill(both, [hit + 5, 3], "ced", max_len=SMALL_LEN, all_logits=True)[1]


def test_the_small_models_have_every_kind_of_state(small):
    config = small.model.config
    assert {config.compress_ratios[s] for s in config.kv_source_layer_ids} == {1, 2}
    assert config.candidate_source_layer_id is not None and config.engram_layer_ids and config.n_draft
    assert config.sliding_window < 16


@pytest.mark.parametrize("hit", EDGES)
def test_hits_at_page_edges(small, hit):
    """The prompt and three tokens more, beside the row that gave the prefix, which goes on too."""
    loaded, oracle, n = small.model, small.oracle, EDGES[hit]
    config = loaded.config
    ids = small.ids[: n + 3]
    read = oracle.read(ids, n, hit, small.kept)
    other, cache = small_donor(small, hit)
    neighbour = oracle.read(other, hit + 5)
    assert min(small.kept["margin"], read["margin"], neighbour["margin"]) > MARGIN

    pages = cache.pages(0)[: pages_for(hit)]
    not_own = [p for p in range(6) if p not in np.asarray(cache.arrays.page_table)[1]]
    assert set(pages) <= set(not_own)
    before = page_bytes(cache, not_own)
    logits, cache = loaded.resume(cache, 1, pages, hit, ids[:n], all_logits=True)
    assert page_bytes(cache, not_own) == before
    shared = page_bytes(cache, pages[: hit // 128])
    assert cache.pages(1)[: hit // 128] == pages[: hit // 128]
    assert not set(cache.pages(1)[hit // 128 :]) & set(not_own)
    seen = len(logits)
    assert seen == n - read["split"] == config.sliding_window
    assert distance(logits, read["logits"][:seen]) <= ATOL
    after = [other[hit + 5 :], ids[n:]]
    tokens, draft_logits, _ = loaded.draft(cache, np.array([row[0] for row in after]))
    draft = oracle.draft(read, n - 1, int(ids[n]))
    assert min(draft["margin"].min(), *(m.min() for m in draft["expert_margin"].values())) > MARGIN
    np.testing.assert_array_equal(tokens[1], draft["tokens"])
    assert distance(draft_logits[1], draft["logits"]) <= ATOL
    logits, cache = feed(loaded, cache, after)
    assert distance(logits[0], neighbour["logits"][hit + 5 - neighbour["split"] :]) <= ATOL
    assert distance(logits[1], read["logits"][seen:]) <= ATOL
    assert page_bytes(cache, pages[: hit // 128]) == shared
    for row, expected in ((0, neighbour), (1, read)):
        for source in config.kv_source_layer_ids:
            for name, stored in zip(("main_kv", "index_key"), entries(loaded, cache, row, source), strict=True):
                assert distance(stored, expected[name][source]) <= ATOL
    if hit % 2:
        for source in (s for s in config.kv_source_layer_ids if config.compress_ratios[s] == 2):
            kept_row = oracle.entry_of_a_kept_row(source, read, hit, small.kept)
            stored, _ = entries(loaded, cache, 1, source)
            assert distance(stored[hit // 2], read["main_kv"][source][hit // 2]) <= ATOL
            assert distance(stored[hit // 2], kept_row) > CLEARLY


# --- mistakes --------------------------------------------------------------------------------------------------------


def read_as(monkeypatch, split) -> None:
    """Let the layers after the encoder begin at split(reading)."""
    of = ced.Reading.of

    def reading(*args, **kwargs):
        right = of(*args, **kwargs)
        return dataclasses.replace(right, split=split(right))

    monkeypatch.setattr(ced.Reading, "of", reading)


def move_floor(monkeypatch, name: str, by: int) -> None:
    """Move a floor in every step; in the cache it stays where it is."""
    right = Runner.step

    def step(self, arrays, *args, **kwargs):
        if name == "write_floor":
            floor = kwargs.get(name)
            return right(self, arrays, *args, **{**kwargs, name: None if floor is None else floor + by})
        floor = getattr(arrays, name)
        logits, arrays = right(self, arrays.replace(**{name: floor + by}), *args, **kwargs)
        return logits, arrays.replace(**{name: floor})

    monkeypatch.setattr(Runner, "step", step)


def test_the_decoder_window_is_not_truncated(model, watch, monkeypatch):
    """The decoder sees one window more, or everything."""
    for split in (lambda r: max(r.split - 16, 0), lambda r: 0):
        with monkeypatch.context() as patch:
            read_as(patch, split)
            logits, _ = prefill(model, ("mid", "len33"))
        for row, n in zip(logits, (41, 33), strict=True):
            expected = recording("ced")[f"ced.{'mid' if n == 41 else 'len33'}.logits"]
            assert distance(row[n - 1], expected[-1]) > CLEARLY
            assert distance(row[n - 16 : n], expected) > CLEARLY


def test_the_decoder_is_not_replayed(model, watch, monkeypatch):
    """Only the last token runs through all layers; or its last window does, and is lost before what follows."""

    def forget(cache):
        floor = jnp.asarray(cache.lengths, jnp.int32)
        return dataclasses.replace(cache, arrays=cache.arrays.replace(decoder_floor=floor))

    lost = ced_distances(model, None, ("mid", "len33"), then=forget)
    read_as(monkeypatch, lambda r: r.end - 1)
    logits, _ = prefill(model, ("mid", "len33"))
    for row, (case, n) in zip(logits, (("mid", 41), ("len33", 33)), strict=True):
        assert lost[f"ced.{case}.logits"] <= ATOL
        assert lost[f"ced.{case}.draft logits"] > CLEARLY and lost[f"ced.{case}.decode"] > CLEARLY
        assert distance(row[n - 1], recording("ced")[f"ced.{case}.logits"][-1]) > CLEARLY


@pytest.mark.parametrize("by", [-1, 1])
def test_the_decoder_floor_is_off_by_one(model, watch, monkeypatch, by):
    move_floor(monkeypatch, "decoder_floor", by)
    found = ced_distances(model, None, ("mid", "len33"))
    assert min(found["ced.mid.logits"], found["ced.len33.logits"], found["ced.mid.decode"]) > CLEARLY


# What a wrong floor moves. A prefix of odd length has its last whole pair, and its last entry of ratio 1, before it.
@pytest.mark.parametrize(
    ("name", "by", "hit", "moved"),
    [
        ("encoder_floor", -1, 100, ("block_out", "main_kv.2.new", "index_key.6.new")),
        ("encoder_floor", 1, 100, ("block_out", "main_kv.2.new", "index_key.6.new")),
        ("decoder_floor", -1, 139, ("logits", "draft logits", "decode")),
        ("decoder_floor", 1, 139, ("logits", "draft logits", "decode")),
        ("write_floor", -1, 100, ("main_kv.2.kept", "main_kv.4.kept", "index_key.6.kept")),
        ("write_floor", -1, 33, ("main_kv.6.kept", "index_key.6.kept")),
        ("write_floor", 1, 33, ("main_kv.2.new", "index_key.4.new", "main_kv.6.new", "logits")),
        ("write_floor", 1, 100, ("main_kv.6.new", "index_key.6.new")),
    ],
    ids=lambda value: None if isinstance(value, tuple) else str(value),
)
def test_a_floor_of_the_replay_is_off_by_one(model, watch, monkeypatch, name, by, hit, moved):
    cache = donor(model, hit)
    move_floor(monkeypatch, name, by)
    found = replay_distances(model, watch, hit, (140,), cache)
    assert min(found[f"replay.h{hit}.n140.{what}"] for what in moved) > CLEARLY


def test_two_pages_are_swapped(model, watch):
    """In the prefix; and in the page table between a prompt and what follows."""
    cache = donor(model, 130)
    found = replay_distances(model, None, 130, (140,), cache, cache.pages(0)[1::-1])
    key = "replay.h130.n140"
    assert min(found[f"{key}.{what}"] for what in ("logits", "main_kv.2.kept", "main_kv.6.kept", "decode")) > CLEARLY

    def swap(cache):
        table = jnp.asarray(np.asarray(cache.arrays.page_table)[:, ::-1])
        return dataclasses.replace(cache, arrays=cache.arrays.replace(page_table=table))

    found = ced_distances(model, None, ("long", "mid"), then=swap)
    assert min(found["ced.long.decode"], found["ced.mid.decode"]) > CLEARLY


# --- rows that are used again ----------------------------------------------------------------------------------------


def test_a_row_is_resumed_again_and_again(model, watch):
    """The pages it gave up for shared ones are found again."""
    cache, g, ids = donor(model, 130), recording("ced"), prompt("long")[0]
    for hit, n in ((130, 140), (100, 200), (130, 140)):
        logits, cache = model.resume(cache, 1, cache.pages(0)[: pages_for(hit)], hit, ids[:n], all_logits=True)
        assert distance(logits[-1], g[f"replay.h{hit}.n{n}.logits"]) <= ATOL


def test_going_back_stops_before_shared_pages(model, watch):
    """Whoever of the two goes back; and behind them, going back leaves no trace."""
    ids = prompt("long")[0]
    cache = donor(model, 128)
    pages = cache.pages(0)[:1]
    before = page_bytes(cache, pages)
    logits, cache = model.resume(cache, 1, pages, 128, ids[:131], all_logits=True)
    for lengths in ([127, 131], [133, 127]):
        with pytest.raises(ValueError, match=r"rows can go back to \[128, 128\].*not into a prefix that is shared"):
            cache.rewind(lengths)
    _, cache = feed(model, cache, [[], [7, 8, 9]])
    _, cache = feed(model, cache.rewind([128, 128]), [[9, 9], [9, 9]])
    (_, after), cache = feed(model, cache.rewind([128, 128]), [[], ids[128:131]])
    assert distance(after, np.asarray(logits)[-3:]) <= ATOL
    assert page_bytes(cache, pages) == before


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_chooses_as_if_it_had_read_exactly(golden):
    """Teacher-forced: 50 held-out texts, the next-token choices at 10 places each."""
    demo = ds.load("demo")
    texts = held_out_contexts(golden / "demo_heldout", rows=50, length=265)
    prompts, following = texts[:, :256], texts[:, 256:]
    assert prompts.shape[1] == 4 * demo.config.sliding_window
    choices = {}
    for mode in ("exact", "ced"):
        first, cache = demo.prefill(prompts, mode=mode)
        rest, _ = demo.decode(cache, following)
        choices[mode] = np.concatenate([np.asarray(first)[:, None], rest], axis=1).argmax(-1)
    equal = choices["exact"] == choices["ced"]
    assert equal.shape == (50, 10)
    assert equal.mean() >= 0.95, f"{equal.sum()} of {equal.size}"
