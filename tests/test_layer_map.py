"""The layer-share map: the released one, and what every legal map must satisfy."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.layer_map import LayerShare, Mode, format_layer_map, layer_map, main
from random_configs import random_legal_config

ROOT = Path(__file__).parent.parent


def test_released_map():
    shares = layer_map(load_config(ROOT / "configs/flash.py"))
    assert len(shares) == 43 and [s.layer for s in shares] == list(range(43))
    modes = {mode: [s.layer for s in shares[:40] if s.mode is mode] for mode in Mode}
    assert modes[Mode.WINDOW] == [0, 1]
    assert modes[Mode.FULL] == [2, 8, 14, 20]
    assert modes[Mode.REINDEX] == [24, 28, 32, 36]
    assert [s.side for s in shares] == ["encoder"] * 20 + ["decoder"] * 20 + ["draft"] * 3
    assert [s.main_kv_from for s in shares] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20 + [None] * 3
    selections = [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [s.index_from for s in shares] == [None] * 2 + selections + [None] * 3
    assert [s.layer for s in shares if s.engram] == [1, 14]
    assert [s.layer for s in shares if s.tapped] == [37, 38, 39]
    assert {s.layer: s.pool for s in shares if s.pool} == {20: "builds", **dict.fromkeys((24, 28, 32, 36), "searches")}
    assert shares[24] == LayerShare(
        layer=24,
        side="decoder",
        mode=Mode.REINDEX,
        ratio=1,
        main_kv_from=20,
        index_key_from=20,
        index_from=24,
        pool="searches",
        engram=False,
        tapped=False,
    )


def test_ratio_does_not_make_a_source():
    """Pitfall A1: ratios name the cache a layer reads; only kv_source_layer_ids own a compressor."""
    given_config = random_legal_config(0)
    given_config["text_config"] |= {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 0, 2, 2, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    shares = layer_map(ModelConfig.from_json(given_config))
    assert [s.mode.name for s in shares] == ["WINDOW", "WINDOW", "FULL", "REUSE", "FULL", "REUSE"]
    assert [s.main_kv_from for s in shares] == [None, None, 2, 2, 4, 4]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_legal_map_is_consistent(seed):
    config = ModelConfig.from_json(random_legal_config(seed))
    shares = layer_map(config)
    assert len(shares) == config.num_hidden_layers + config.n_draft == len(config.compress_ratios)
    nearest_kv = nearest_index = None
    for share in shares[: config.num_hidden_layers]:
        layer = share.layer
        nearest_kv = layer if layer in config.kv_source_layer_ids else nearest_kv
        nearest_index = layer if layer in config.index_source_layer_ids else nearest_index
        assert share.ratio == config.compress_ratios[layer]
        assert (share.mode is Mode.WINDOW) == (share.ratio == 0)
        assert (share.side == "decoder") == (layer >= config.decoder_start)
        if share.mode is Mode.WINDOW:
            assert share.main_kv_from is share.index_key_from is share.index_from is share.pool is None
            continue
        assert (share.main_kv_from, share.index_from) == (nearest_kv, nearest_index)
        source, selector = shares[share.main_kv_from], shares[share.index_from]
        assert source.mode is Mode.FULL and source.ratio == share.ratio
        # A selection holds row numbers of one source, so who selected must have read the same source.
        assert selector.mode in (Mode.FULL, Mode.REINDEX) and selector.main_kv_from == share.main_kv_from
        assert share.index_key_from == (None if share.mode is Mode.REUSE else share.main_kv_from)
        if share.pool == "searches":
            builder = shares[config.candidate_source_layer_id]
            assert builder.pool == "builds" and builder.main_kv_from == share.main_kv_from and builder.layer < layer
    for share in shares[config.num_hidden_layers :]:
        assert share.side == "draft" and share.mode is Mode.WINDOW and not share.tapped and not share.engram
    assert tuple(s.layer for s in shares if s.tapped) == config.taps
    assert sorted(s.layer for s in shares if s.engram) == sorted(config.engram_layer_ids)
    assert sum(s.pool == "builds" for s in shares) == (config.candidate_source_layer_id is not None)
    assert len(format_layer_map(config).splitlines()) == len(shares) + 2


def test_generator_covers_the_kinds():
    """The first dozen seeds meet every kind of map between them."""
    configs = [ModelConfig.from_json(random_legal_config(seed)) for seed in range(12)]
    maps = [layer_map(config) for config in configs]
    assert {share.mode for shares in maps for share in shares[:-3]} == set(Mode)
    assert any(not config.kv_source_layer_ids for config in configs)
    assert {config.n_draft for config in configs} == {0, 1, 2, 3}
    assert {config.hc_mult for config in configs} == {2, 3, 4}
    assert {bool(config.engram_layer_ids) for config in configs} == {True, False}
    assert {config.supports_ced for config in configs} == {True, False}
    assert any(share.pool == "searches" for shares in maps for share in shares)
    assert any(len(config.kv_source_layer_ids) > 1 for config in configs)
    ratios = {tuple(config.compress_ratios[i] for i in config.kv_source_layer_ids) for config in configs}
    assert {ratio for row in ratios for ratio in row} == {1, 2}
    assert any(pair == (1, 2) for row in ratios for pair in pairwise(row))
    # A window layer between a source and one of its readers.
    assert any(
        config.compress_ratios[i] == 0 and 0 < i < config.num_hidden_layers - 1 and shares[i + 1].mode is Mode.REUSE
        for config, shares in zip(configs, maps, strict=True)
        for i in range(config.num_hidden_layers - 1)
    )
    assert random_legal_config(5) == random_legal_config(5)


def test_command_prints_the_table():
    command = [sys.executable, "-m", "dsv41_jax.layer_map", "--config=configs/flash.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 43 + 1 and lines[0].split()[:3] == ["layer", "side", "mode"]
    assert lines[25].split()[:9] == ["24", "decoder", "REINDEX", "1", "@20", "@20", "@24*", "searches", "-"]
    assert "mtp.2" in lines[43] and "37,38,39" in lines[43] and "@" not in lines[43]
    assert lines[44].startswith("mode:")


def test_command_reads_json_and_folders(capsys):
    main([f"--config={ROOT / 'tests/golden/tinyA_config.json'}"])
    from_file = capsys.readouterr().out
    main([f"--config={ROOT / 'configs/tiny.py'}"])
    assert capsys.readouterr().out == from_file


def test_every_shipped_config_supports_ced():
    for name in ("flash", "tiny", "demo"):
        assert load_config(ROOT / f"configs/{name}.py").supports_ced
