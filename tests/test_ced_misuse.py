"""CED prefill and encoder replay misused: an error that says what is wrong, and the cache is as it was."""

import jax
import numpy as np
import pytest

import dsv41_jax as ds
from ced_golden import MAX_LEN
from dsv41_jax import ced
from dsv41_jax.config import ModelConfig
from random_configs import random_legal_config


@pytest.fixture(scope="module")
def model(tiny) -> ds.Model:
    return tiny("float32")


MISUSES = {
    "no longer than the window": (dict(hit=16), "longer than the window of 16 and shorter than the prompt of 140"),
    "the whole prompt": (dict(hit=140), "hit=140: a prefix is adopted when it is longer than the window"),
    "more than the prompt": (dict(hit=141), "shorter than the prompt of 140 tokens"),
    "too few pages": (dict(prefix_pages=[0]), "a prefix of 130 tokens has 2 pages, 1 are given"),
    "too many pages": (dict(prefix_pages=[0, 1, 2]), "a prefix of 130 tokens has 2 pages, 3 are given"),
    "a page twice in the prefix": (dict(prefix_pages=[0, 0]), r"pages \[0, 0\] of the prefix .* be named once"),
    "a page twice in the rest": (dict(hit=100, prefix_pages=[0], own_pages=[3, 3]), r"and \[3, 3\] for the rest"),
    "a page of the prefix in the rest": (dict(own_pages=[1]), r"pages \[0, 1\] of the prefix and \[1\] for the rest"),
    "a page that does not exist": (dict(prefix_pages=[0, 6]), r"pages \[0, 6\] .* one of the 6 pages from 0 on"),
    "a page before the first": (dict(own_pages=[-1]), r"and \[-1\] for the rest: each must be one of"),
    "no pages for the rest": (dict(own_pages=[]), r"1 pages that are not the prefix's are needed .* got \[\]"),
    "a row that does not exist": (dict(row=3), "row=3: the cache has 3 rows"),
    "a row before the first": (dict(row=-1), "row=-1: the cache has 3 rows"),
    "a prompt that does not fit": (dict(token_ids=np.full(257, 5)), "a prompt of 257 tokens does not fit the cache"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_an_error_and_spends_nothing(model, case):
    changed, message = MISUSES[case]
    cache = model._runner.new_cache(3, MAX_LEN)
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache.arrays)]
    arguments = dict(row=1, prefix_pages=[0, 1], hit=130, token_ids=np.full(140, 5, np.int32)) | changed
    with pytest.raises(ValueError, match=message):
        model.resume(cache, **arguments)
    for old, new in zip(before, jax.tree.leaves(cache.peek()), strict=True):
        assert old.tobytes() == np.asarray(new).tobytes()


def test_an_unknown_mode_is_an_error(model):
    with pytest.raises(ValueError, match="prefill mode 'fast' is unknown; choose one of ced, exact"):
        model.prefill([[5, 6]], mode="fast")


def test_a_model_without_such_a_split_is_told_to_read_exactly():
    """Engram in the decoder, or no KV source."""
    configs = [ModelConfig.from_json(random_legal_config(seed)) for seed in range(16)]
    refused = [config for config in configs if not config.supports_ced]
    assert {bool(config.kv_source_layer_ids) for config in refused} == {True, False}
    for config in refused:
        with pytest.raises(ValueError, match='no encoder-only prefill.*use the mode "exact"'):
            ced.check_mode("ced", config)
        ced.check_mode("exact", config)
