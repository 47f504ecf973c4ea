"""Engram for the slow oracle: table layout, multipliers, n-gram hashes and the gated update; float64, int64 numpy."""

import numpy as np

from oracle_parts import sigmoid


def is_prime(number: int) -> bool:
    """Trial division."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def table_primes(text: dict) -> dict[int, list[list[int]]]:
    """{layer id: [n-gram size 2..N][head] -> prime}; no prime is used twice over all layers, sizes and heads."""
    used: set[int] = set()
    primes: dict[int, list[list[int]]] = {}
    for layer in text["engram_layer_ids"]:
        primes[layer] = []
        for _size in range(2, text["engram_max_ngram_size"] + 1):
            candidate, row = text["engram_vocab_size"], []
            for _head in range(text["engram_n_heads"]):
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
            primes[layer].append(row)
    return primes


def table_rows(text: dict) -> list[int]:
    """What `engram_num_embeddings` must be: the sum of each Engram layer's primes, in layer order."""
    return [sum(map(sum, primes)) for primes in table_primes(text).values()]


def multipliers(text: dict, layer: int) -> np.ndarray:
    """[N] odd int64 factors of one layer."""
    bound = max(1, ((2**63 - 1) // text["engram_compressed_vocab_size"]) // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, text["engram_max_ngram_size"], dtype=np.int64)
    return 2 * draws + 1


def hash_rows(text: dict, layer: int, compressed: np.ndarray, dead: np.ndarray, pad: int) -> np.ndarray:
    """Compressed ids [n], dead positions bool [n] -> table row numbers int64 [n, (N-1)*heads], size-major."""
    primes = table_primes(text)[layer]
    factors = multipliers(text, layer)
    rows = np.zeros((len(compressed), sum(map(len, primes))), np.int64)
    for position in range(len(compressed)):
        slots, blocked = [], False
        for back in range(text["engram_max_ngram_size"]):
            source = position - back
            blocked = blocked or source < 0 or bool(dead[source])
            slots.append(pad if blocked else int(compressed[source]))
        mixed, column, offset = slots[0] * int(factors[0]), 0, 0
        for size_index, size_primes in enumerate(primes):
            mixed ^= slots[size_index + 1] * int(factors[size_index + 1])
            for prime in size_primes:
                rows[position, column] = mixed % prime + offset
                column, offset = column + 1, offset + prime
    return rows


def engram_update(
    text: dict, weights: dict[str, np.ndarray], layer: int, x: np.ndarray, rows: np.ndarray, dead: np.ndarray
) -> np.ndarray:
    """Add the gated table value to every residual copy: x [n, C, D], rows [n, columns], dead bool [n] -> [n, C, D]."""
    prefix, eps = f"layers.{layer}.engram", text["rms_norm_eps"]
    n, streams, dim = x.shape
    looked_up = weights[f"{prefix}.embed.weight"][rows].reshape(n, -1)
    key_value = looked_up @ weights[f"{prefix}.wkv.weight"].T
    key, value = key_value[:, : streams * dim].reshape(n, streams, dim), key_value[:, streams * dim :]
    pair = weights[f"{prefix}.q_weight"] * weights[f"{prefix}.k_weight"]
    dot = np.sum(x * pair * key, -1) * dim**-0.5
    dot /= np.sqrt(np.mean(x**2, -1) + eps) * np.sqrt(np.mean(key**2, -1) + eps)
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
    gate = np.where(dead[:, None], 0.0, gate)
    return x + gate[..., None] * value[:, None, :]
