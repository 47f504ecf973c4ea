"""`ds.load`: choices and what is said about wrong ones, where folders come from; placements change no number."""

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import jax
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from random_configs import random_legal_config
from random_models import random_token_map, write_model
from text_model import byte_tokenizer, text_config, write_text_model

SEED = 25  # Engram in all layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a tokenizer."""
    path = tmp_path_factory.mktemp("load") / "text"
    write_text_model(path)
    return path


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory):
    """Without a tokenizer."""
    path = tmp_path_factory.mktemp("load") / "bare"
    write_model(path, random_legal_config(SEED), SEED)
    return path


def token_map():
    return random_token_map(random_legal_config(SEED), SEED)


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"numerics": "fp16"}, "numerics='fp16' is unknown.*float32, noquant, released"),
        ({"implementation": "tpu"}, "needs a TPU, and JAX sees only"),
        ({"expert_storage": "int8"}, "expert_storage='int8' is unknown.*fp4, fp8, bf16"),
        ({"engram": "disk"}, "engram='disk' is unknown.*device, host, mmap"),
        ({"mesh": object()}, r"mesh: object with axes \(\)"),
    ],
)
def test_unknown_choices_are_named_before_anything_is_fetched_or_read(choice, message, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.setattr(ReleasedFolder, "open", lambda *_: pytest.fail("opened the folder"))
    for path in (folder, "owner/name"):
        with pytest.raises(ValueError, match=message):
            ds.load(path, **choice)


def test_what_is_loaded(folder):
    for numerics in ("released", "noquant", "float32"):
        model = ds.load(str(folder), numerics=numerics, implementation="reference")
        assert model.numerics == numerics
        assert model.config == ds.ModelConfig.from_json(text_config())
        assert model.layer_map == ds.layer_map(model.config)
    assert ds.load(folder).numerics == "released"
    assert model.params["layers"]["attn"]["wq_a"]["weight"].dtype == np.float32
    assert model.tokenizer.encode("the") == [byte_tokenizer().token_to_id("the")]


# --- token maps ------------------------------------------------------------------------------------------------------


def test_engram_needs_a_tokenizer_or_a_token_map(bare_folder):
    with pytest.raises(ValueError, match="Engram layers and no tokenizer.json: pass token_map"):
        ds.load(bare_folder)
    model = ds.load(bare_folder, token_map=token_map())
    assert model.tokenizer is None
    for call in (model.generate, model.stream):
        with pytest.raises(ValueError, match="no tokenizer.json: text calls need one"):
            call("the")


def test_a_token_map_must_fit(bare_folder):
    with pytest.raises(ValueError, match="token_map has 3 entries for a vocabulary of"):
        ds.load(bare_folder, token_map=np.arange(3))
    with pytest.raises(ValueError, match="engram_compressed_vocab_size"):
        ds.load(bare_folder, token_map=np.zeros_like(token_map()))


def test_a_model_without_engram_needs_neither(tmp_path):
    config = random_legal_config(56)
    config["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    write_model(tmp_path / "model", config, 0)
    assert ds.load(tmp_path / "model").tokenizer is None


# --- folders and hub ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["nowhere", "a/b/c", "/no/where", "./no/where", "../where", "~/where", "owner/"])
def test_a_missing_folder_is_not_taken_for_a_hub_id(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match='no such folder, and not a hub id of the form "owner/name"') as error:
        ds.load(path)
    assert path in str(error.value)


@pytest.mark.parametrize(
    "path", ["owner/model.safetensors", "owner/config.json", "own er/name", "-owner/name", "a/b?c"]
)
def test_what_is_no_hub_id_is_not_asked_for(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ds.load(path)


def test_a_typo_beside_local_folders_is_not_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models/file").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="models/tpyo: no such folder"):
        ds.load("models/tpyo")
    for path in ("models/file", tmp_path / "models/file"):
        with pytest.raises(FileNotFoundError, match="models/file is a file; give the folder that holds it"):
            ds.load(path)
    for path in ("", Path("")):
        with pytest.raises(ValueError, match="path is empty|config.json"):
            ds.load(path)


def test_a_revision_is_for_hub_ids(folder):
    for path in (folder, str(folder), "demo"):
        with pytest.raises(ValueError, match="revision='main' is for hub ids, but .* is a local folder"):
            ds.load(path, revision="main")


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ("GatedRepoError", FileNotFoundError, "accept them on its page and log in"),
        ("RepositoryNotFoundError", FileNotFoundError, "neither a folder here nor a model on the hub"),
        ("RevisionNotFoundError", FileNotFoundError, "not that revision"),
        ("LocalEntryNotFoundError", ConnectionError, "check the network"),
        ("OfflineModeIsEnabled", ConnectionError, "OfflineModeIsEnabled: .*or give a local folder"),
        (TimeoutError, ConnectionError, "check the network"),
    ],
)
def test_failures_of_the_hub_name_the_id_and_a_remedy(failure, kind, words, monkeypatch):
    cls = getattr(huggingface_hub.errors, failure) if isinstance(failure, str) else failure
    error = cls.__new__(cls)
    error.args = ("what the client says\nat length",)

    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(kind, match=f"some-owner/model at revision v1: .*{words}") as caught:
        ds.load("some-owner/model", revision="v1")
    assert caught.value.__cause__ is error and "at length" not in str(caught.value)


def test_hub_ids_are_downloaded(folder, monkeypatch):
    asked = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None, **others):
        asked.append((repo_id, revision, allow_patterns))
        assert not others
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert ds.load("some-owner/some.model-1", revision="abc123").tokenizer is not None
    ds.load("some-owner/some.model-1")
    assert [entry[:2] for entry in asked] == [("some-owner/some.model-1", "abc123"), ("some-owner/some.model-1", None)]
    wanted = set(asked[0][2])
    assert {"config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"} <= wanted
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in wanted)  # data only


def test_a_folder_wins_over_a_hub_id(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert ds.load("owner/name").config.num_hidden_layers == 3


def test_a_wrong_folder_says_so(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(text_config() | {"model_type": "deepseek_v4"}))
    with pytest.raises(ValueError, match="model_type"):
        ds.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        ds.load(tmp_path)


# --- placements ------------------------------------------------------------------------------------------------------


def test_places_and_storages_give_identical_logits(folder):
    """Every E2M1 value under its scale is exact in E4M3 and in bf16, and a table row is the same row anywhere."""
    ids = np.random.default_rng(0).integers(3, 200, (2, 11)).astype(np.int32)
    found, kinds = [], []
    for engram, storage in (("device", "fp4"), ("host", "fp8"), ("mmap", "bf16")):
        model = ds.load(folder, engram=engram, expert_storage=storage)
        logits, cache = model.prefill(ids, lengths=[11, 6], all_logits=True)
        found.append([np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves((logits, cache.arrays))])
        kinds.append((str(model.params["layers"]["ffn"]["experts"]["w1"]["weight"].dtype), "embed" in _table(model)))
    assert kinds == [("uint8", True), ("float8_e4m3fn", False), ("bfloat16", False)]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    values = np.asarray(logits)
    assert np.isfinite(values[:, :6]).all() and values[:, :6].std() > 0.1


def _table(model):
    return model.params["engram"][f"l{model.config.engram_layer_ids[0]}"]
