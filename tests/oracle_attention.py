"""Attention for the slow oracle: window, compressed stream, indexer, candidate pool, selection; float64 numpy.

Array letters: n tokens, N compressed entries, h heads, d head dim, K index_topk. `positions` are absolute, consecutive.
"""

import math
from dataclasses import dataclass

import numpy as np

from oracle_parts import Weights, best, rms_norm, rope_frequencies, rotate, softmax


@dataclass
class Stream:
    """What a KV source leaves for itself and later layers: entry j stands for tokens j*ratio .. j*ratio + ratio - 1."""

    main_kv: np.ndarray  # [N, d] rotated
    index_key: np.ndarray  # [N, index_head_dim] rotated


@dataclass
class Selection:
    """What an index source leaves for itself and later layers."""

    rows: list[np.ndarray]  # per token, ascending entry numbers
    margin: np.ndarray  # [n] score gap between the last chosen and the first unchosen visible entry, inf when no choice


def nearest_source(sources: list[int], layer: int) -> int:
    """The last source at or before a layer."""
    return max(source for source in sources if source <= layer)


def sparse_attention(q: np.ndarray, rows: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """One query q [h, d] over rows [m, d] (key and value), sink [h] only in the denominator -> [h, d]; 0 if m = 0."""
    if len(rows) == 0:
        return np.zeros_like(q)
    logits = q @ rows.T * q.shape[-1] ** -0.5
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - top)
    return p @ rows / (p.sum(-1, keepdims=True) + np.exp(sink[:, None] - top))


def low_rank_query(text: dict, weights: Weights, prefix: str, y: np.ndarray) -> np.ndarray:
    """Normed low-rank query [n, q_lora_rank], shared by attention and indexer."""
    return rms_norm(y @ weights[f"{prefix}.wq_a.weight"].T, weights[f"{prefix}.q_norm.weight"], text["rms_norm_eps"])


def queries(
    text: dict, weights: Weights, prefix: str, y: np.ndarray, positions: np.ndarray, freqs: np.ndarray
) -> np.ndarray:
    """y [n, D] -> rotated queries [n, h, d]."""
    q = low_rank_query(text, weights, prefix, y) @ weights[f"{prefix}.wq_b.weight"].T
    return rotate(q.reshape(len(y), text["num_attention_heads"], text["head_dim"]), positions, freqs)


def window_rows(
    text: dict, weights: Weights, prefix: str, y: np.ndarray, positions: np.ndarray, freqs: np.ndarray
) -> np.ndarray:
    """y [n, D] -> rotated window KV rows [n, d]."""
    kv = rms_norm(y @ weights[f"{prefix}.wkv.weight"].T, weights[f"{prefix}.kv_norm.weight"], text["rms_norm_eps"])
    return rotate(kv, positions, freqs)


def output_projection(
    text: dict, weights: Weights, prefix: str, o: np.ndarray, positions: np.ndarray, freqs: np.ndarray
) -> np.ndarray:
    """Attention result o [n, h, d] -> inverse rotation, grouped wo_a, wo_b -> [n, D]."""
    groups = text["o_groups"]
    o = rotate(o, positions, freqs, inverse=True).reshape(len(o), groups, -1)
    wo_a = weights[f"{prefix}.wo_a.weight"].reshape(groups, text["o_lora_rank"], -1)
    low = np.einsum("ngi,goi->ngo", o, wo_a).reshape(len(o), -1)
    return low @ weights[f"{prefix}.wo_b.weight"].T


def compress(text: dict, weights: Weights, layer: int, y: np.ndarray, positions: np.ndarray) -> Stream:
    """A KV source's stream from its normed inputs y [n, D]; positions must start at a multiple of the ratio."""
    prefix, ratio, eps = f"layers.{layer}.attn", text["compress_ratios"][layer], text["rms_norm_eps"]
    entries = len(y) // ratio
    kv = y @ weights[f"{prefix}.compressor.wkv.weight"].T
    if ratio > 1:
        gate = y @ weights[f"{prefix}.compressor.wgate.weight"].T
        kv, gate = (a[: entries * ratio].reshape(entries, ratio, a.shape[1]) for a in (kv, gate))
        kv = np.sum(softmax(gate, axis=1) * kv, axis=1)
    latent = rms_norm(kv, weights[f"{prefix}.compressor.norm.weight"], eps)
    key = rms_norm(latent @ weights[f"{prefix}.indexer.wk.weight"].T, weights[f"{prefix}.indexer.k_norm.weight"], eps)
    at, freqs = positions[: entries * ratio : ratio], rope_frequencies(text, ratio)
    return Stream(rotate(latent, at, freqs), rotate(key, at, freqs))


def index_scores(
    text: dict, weights: Weights, layer: int, y: np.ndarray, positions: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores [n, N] over the KV source's keys [N, index_head_dim]; -inf where entry j >= floor((t+1)/ratio).

    Also [n, N]: how far each score is from changing sign or ceasing to be exactly zero.
    """
    prefix, ratio = f"layers.{layer}.attn", text["compress_ratios"][layer]
    heads, dim = text["index_n_heads"], text["index_head_dim"]
    q = low_rank_query(text, weights, prefix, y) @ weights[f"{prefix}.indexer.wq_b.weight"].T
    q = rotate(q.reshape(len(y), heads, dim), positions, rope_frequencies(text, ratio))
    head_weights = y @ weights[f"{prefix}.indexer.weights_proj.weight"].T * dim**-0.5 * heads**-0.5
    products = np.einsum("nhd,jd->nhj", q, keys)
    scores = np.einsum("nh,nhj->nj", head_weights, np.maximum(products, 0.0))
    slack = np.where(scores == 0, -products.max(1), np.abs(scores))
    visible = np.arange(len(keys)) < ((positions + 1) // ratio)[:, None]
    return np.where(visible, scores, -np.inf), slack


def candidate_pool(text: dict, scores: np.ndarray, slack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores [n, N] of the candidate source (-inf = not visible) -> pool bool [n, N], margin [n] of the blocks."""
    block, count = text["candidate_block_size"], text["candidate_topk_blocks"]
    n, entries = scores.shape
    pool, margin = np.zeros((n, entries), bool), np.full(n, math.inf)
    padding = ((0, 0), (0, -entries % block))
    padded = np.pad(scores, padding, constant_values=-np.inf)
    zero_slack = np.pad(np.where(scores > -np.inf, slack, np.inf), padding, constant_values=np.inf)
    for t in range(n):
        visible = int(np.isfinite(scores[t]).sum())
        if visible == 0:
            continue
        block_scores = padded[t].reshape(-1, block).max(-1)
        block_scores[(visible - 1) // block] = np.inf
        kept, margin[t] = best(block_scores, count, zero_slack[t].reshape(-1, block).min(-1))
        for b in kept[block_scores[kept] > -np.inf]:
            pool[t, b * block : (b + 1) * block] = True
    return pool, margin


def select(text: dict, scores: np.ndarray, slack: np.ndarray, pool: np.ndarray | None) -> Selection:
    """The best min(K, N) entries of each row of scores [n, N] inside the pool, less entries that are not visible."""
    masked = scores if pool is None else np.where(pool, scores, -np.inf)
    rows, margin = [], np.full(len(scores), math.inf)
    for t in range(len(scores)):
        chosen, margin[t] = best(masked[t], min(text["index_topk"], scores.shape[1]), slack[t])
        rows.append(np.sort(chosen[scores[t, chosen] > -np.inf]))
    return Selection(rows, margin)


def attend(
    text: dict,
    weights: Weights,
    layer: int,
    y: np.ndarray,
    positions: np.ndarray,
    main_kv: np.ndarray | None,
    selected: list[np.ndarray] | None,
) -> np.ndarray:
    """Backbone attention of one layer on tokens y [n, D] -> [n, D]; window keys start at the first of these tokens."""
    prefix, window = f"layers.{layer}.attn", text["sliding_window"]
    freqs = rope_frequencies(text, text["compress_ratios"][layer])
    q = queries(text, weights, prefix, y, positions, freqs)
    kv = window_rows(text, weights, prefix, y, positions, freqs)
    o = np.zeros_like(q)
    for t in range(len(y)):
        rows = kv[max(0, t - window + 1) : t + 1]
        if main_kv is not None:
            rows = np.concatenate([rows, main_kv[selected[t]]])
        o[t] = sparse_attention(q[t], rows, weights[f"{prefix}.attn_sink"])
    return output_projection(text, weights, prefix, o, positions, freqs)
