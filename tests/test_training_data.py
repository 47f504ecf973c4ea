"""Batches: reproducible from the step alone, every window once an epoch, nothing across a sample's border."""

from __future__ import annotations

import numpy as np
import pytest

from dsv41_jax.training.windows import Windows, evaluation_rows
from tiny_training import tiny_training_config, tiny_windows


def test_a_batch_is_a_function_of_seed_and_step():
    config = tiny_training_config()
    one, two = tiny_windows(config), tiny_windows(config)
    for step in (0, 3, 40):  # 40 is in another epoch
        for name, value in one(step).arrays().items():
            np.testing.assert_equal(two(step).arrays()[name], value)
    assert not np.array_equal(one(0).token_ids, one(1).token_ids)
    assert not np.array_equal(tiny_windows(config, seed=6)(0).token_ids, one(0).token_ids)


def test_an_epoch_visits_every_window_once():
    windows = tiny_windows(tiny_training_config(), batch=1)
    starts = np.concatenate([windows.starts(step) for step in range(windows.per_epoch)])
    assert len(set(starts // windows.length)) == windows.per_epoch
    assert len(set(starts % windows.length)) == 1
    assert starts.max() + windows.length < len(windows.tokens)


def test_targets_are_the_next_tokens_and_never_a_sample_start():
    config = tiny_training_config()
    batch = tiny_windows(config, batch=8)(1)
    np.testing.assert_array_equal(batch.targets[:, :-1], batch.token_ids[:, 1:])
    np.testing.assert_array_equal(batch.weights == 0, batch.targets == config.bos_token_id)
    assert (batch.weights == 0).any()


def test_a_sample_addresses_engram_as_it_would_alone():
    config = tiny_training_config()
    windows = tiny_windows(config)
    ids = np.array([[9, 8, 7, config.bos_token_id, 5, 6, 7, 8]])
    packed = windows.make(ids)
    alone = windows.make(ids[:, 3:])
    np.testing.assert_array_equal(packed.memory["l0"][:, 3:], alone.memory["l0"])
    np.testing.assert_array_equal(packed.segment_ids, [[0, 0, 0, 1, 1, 1, 1]])


def test_evaluation_rows_cover_every_target_once():
    rows = evaluation_rows(np.arange(1, 24), 5, pad=0)
    targets = rows[:, 1:].reshape(-1)
    np.testing.assert_array_equal(targets[targets > 0], np.arange(2, 24))
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="fewer than two windows"):
        Windows(np.zeros(40, np.int32), tiny_training_config(), np.arange(64), 1, 32, 0)
