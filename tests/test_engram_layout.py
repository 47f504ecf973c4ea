"""Engram primes, offsets and multipliers against published numbers."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from dsv41_jax.config import load_config
from dsv41_jax.engram_layout import derive_layout, engram_layout, is_prime

ROOT = Path(__file__).parent.parent
GOLDEN = json.loads((ROOT / "tests/golden/engram.json").read_text())


@pytest.mark.parametrize("name", ["released", "small"])
def test_layout_equals_golden(name):
    golden, args = GOLDEN[name], GOLDEN[name]["args"]
    layout = derive_layout(
        tuple(args["engram_layer_ids"]),
        args["engram_max_ngram_size"],
        args["engram_vocab_size"],
        args["engram_n_heads"],
        args["engram_compressed_vocab_size"],
    )
    assert [list(row) for row in layout.primes] == golden["primes"]
    assert [list(row) for row in layout.offsets] == golden["offsets"]
    assert list(layout.table_rows) == golden["table_rows"] == args["engram_num_embeddings"]
    assert [[str(m) for m in row] for row in layout.multipliers] == golden["multipliers"]
    assert layout.columns == len(golden["primes"][0])


def test_released_literals():
    layout = engram_layout(load_config(ROOT / "configs/flash.py"))
    assert layout.primes[0][:3] == (16000057, 16000079, 16000081)
    assert (layout.primes[0][-1], layout.primes[1][0], layout.primes[1][-1]) == (16000463, 16000477, 16000889)
    assert layout.table_rows == (384006168, 384016682)
    assert layout.multipliers[0] == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert layout.multipliers[1] == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_prime_test_is_exact():
    sieve = np.ones(20000, bool)
    sieve[:2] = False
    for n in range(2, 142):
        if sieve[n]:
            sieve[n * n :: n] = False
    assert [is_prime(n) for n in range(len(sieve))] == sieve.tolist()
    # Strong pseudoprimes to the first 4 and the first 9 prime bases, and Carmichael numbers.
    for composite in (3215031751, 3825123056546413051, 561, 41041, 825265):
        assert not is_prime(composite)
    assert is_prime(2**61 - 1) and is_prime(2**63 - 25) and not is_prime((2**31 - 1) ** 2)


def test_no_prime_is_used_twice_and_hashes_fit_int64():
    layout = derive_layout((5, 0, 3), 4, 50, 3, 40)
    primes = [p for row in layout.primes for p in row]
    assert len(set(primes)) == len(primes) == 27
    assert primes == sorted(primes) and primes[0] == 53
    for row in layout.multipliers:
        assert all(m % 2 == 1 and m * 39 < 2**63 for m in row)


def test_derivation_is_fast():
    derive_layout.cache_clear()
    start = time.perf_counter()
    load_config(ROOT / "configs/flash.py")
    assert time.perf_counter() - start < 1.0  # measured 0.03 s; a sieve of 16 million numbers takes seconds
