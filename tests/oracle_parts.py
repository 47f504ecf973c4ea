"""Parts of the slow oracle: norms, rotary tables, residual streams, mixture of experts; float64 numpy.

Array letters: n tokens, C residual copies, D hidden size, E experts, k chosen experts.
"""

import math

import numpy as np

Weights = dict[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Logistic function without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax along one axis."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root-mean-square norm over the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def best(scores: np.ndarray, count: int, zero_slack: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Positions of the `count` highest scores of a vector, best first, lowest position winning ties; and the margin.

    The margin is the score gap between the last one taken and the first one left out; inf when nothing is left out or
    either of the two is infinite. Index scores tie at exactly 0 (ReLU) and do so in any arithmetic; for such a tie the
    margin is how far scores must move to disturb it: `zero_slack` says how far each zero is from ceasing to be one.
    """
    order = np.argsort(-scores, kind="stable")
    if count >= len(scores) or not np.isfinite(scores[order[count - 1 : count + 1]]).all():
        return order[:count], math.inf
    last, first_left = scores[order[count - 1]], scores[order[count]]
    if last == first_left == 0 and zero_slack is not None:
        others = np.abs(scores[scores != 0])
        return order[:count], float(min(others.min(initial=math.inf), zero_slack[scores == 0].min()))
    return order[:count], float(last - first_left)


# --- rotary positions ------------------------------------------------------------------------------------------------


def rope_frequencies(text: dict, ratio: int) -> np.ndarray:
    """float32 [rope_dim/2]: plain base for ratio 0, compressed base with YaRN (if configured) for ratio > 0."""
    d = text["qk_rope_head_dim"]
    base = float(text["compress_rope_theta"] if ratio else text["rope_theta"])
    exponents = np.arange(0, d, 2).astype(np.float32) / np.float32(d)
    frequencies = np.float32(1) / (base ** exponents.astype(np.float64)).astype(np.float32)
    scaling = text.get("rope_scaling")
    if not ratio or not scaling:
        return frequencies
    original = scaling["original_max_position_embeddings"]
    low = max(math.floor(d * math.log(original / (2 * math.pi * scaling["beta_fast"])) / (2 * math.log(base))), 0)
    high = min(math.ceil(d * math.log(original / (2 * math.pi * scaling["beta_slow"])) / (2 * math.log(base))), d - 1)
    pairs = np.arange(d // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(max(high - low, 0.001)), np.float32(0), np.float32(1))
    return (frequencies / np.float32(scaling["factor"])) * ramp + frequencies * (np.float32(1) - ramp)


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Rotate the tail of x [n, ..., dim] at positions [n]: adjacent pairs; the angle is the float32 product."""
    tail = 2 * len(frequencies)
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    angle = angle.reshape(angle.shape[:1] + (1,) * (x.ndim - 2) + angle.shape[1:])
    cos, sin = np.cos(angle), -np.sin(angle) if inverse else np.sin(angle)
    re, im = x[..., -tail::2], x[..., x.shape[-1] - tail + 1 :: 2]
    turned = np.stack([re * cos - im * sin, re * sin + im * cos], axis=-1).reshape(re.shape[:-1] + (tail,))
    return np.concatenate([x[..., :-tail], turned], axis=-1)


# --- residual streams (mHC) ------------------------------------------------------------------------------------------


def coefficients(text: dict, weights: Weights, prefix: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [n, C, D] -> pre [n, C], post [n, C], comb [n, C source, C destination]; prefix ends in hc_attn or hc_ffn."""
    n, streams, _ = x.shape
    fn, base, scale = (weights[f"{prefix}_{leaf}"] for leaf in ("fn", "base", "scale"))
    eps = text["hc_eps"]
    flat = x.reshape(n, -1)
    mix = flat @ fn.T / np.sqrt(np.mean(flat**2, -1, keepdims=True) + text["rms_norm_eps"])
    pre = sigmoid(mix[:, :streams] * scale[0] + base[:streams]) + eps
    post = 2 * sigmoid(mix[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = (mix[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(n, streams, streams)
    comb = softmax(comb, -1) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(text["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(2, keepdims=True) + eps)
        comb = comb / (comb.sum(1, keepdims=True) + eps)
    return pre, post, comb


def collapse(x: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """x [n, C, D], mix [n, C] -> [n, D]."""
    return np.einsum("nc,ncd->nd", mix, x)


def expand(u: np.ndarray, x: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
    """Sublayer output u [n, D] and the stream x [n, C, D] before it -> the stream after it."""
    return post[..., None] * u[:, None, :] + np.einsum("njk,njd->nkd", comb, x)


# --- mixture of experts ----------------------------------------------------------------------------------------------


def _gated(weights: Weights, prefix: str, x: np.ndarray, limit: float) -> np.ndarray:
    """silu(w1 x) * (w3 x) with the clamps."""
    gate, up = x @ weights[f"{prefix}.w1.weight"].T, x @ weights[f"{prefix}.w3.weight"].T
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return silu(gate) * up


def router_scores(text: dict, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x [n, D], gate [E, D] -> unbiased scores [n, E]."""
    logits = x @ gate.T
    if text["scoring_func"] == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0.0, logits))
    if text["scoring_func"] == "softmax":
        return softmax(logits)
    if text["scoring_func"] == "sigmoid":
        return sigmoid(logits)
    raise ValueError(f"unknown scoring_func {text['scoring_func']!r}")


def mixture(
    text: dict, weights: Weights, prefix: str, x: np.ndarray, image: np.ndarray, chosen_count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [n, D], image bool [n] -> output [n, D], experts [n, k] (best first), margin [n] of the biased scores."""
    if text["n_shared_experts"] != 1:
        raise ValueError("the spec only describes one shared expert")
    scores = router_scores(text, x, weights[f"{prefix}.gate.weight"])
    bias = np.where(image[:, None], weights[f"{prefix}.gate.bias_vl"], weights[f"{prefix}.gate.bias"])
    experts = np.zeros((len(x), chosen_count), np.int64)
    margin = np.full(len(x), math.inf)
    for t in range(len(x)):
        experts[t], margin[t] = best(scores[t] + bias[t], chosen_count)
    routing = np.take_along_axis(scores, experts, axis=1)
    if text["norm_topk_prob"] and chosen_count > 1:
        routing = routing / (routing.sum(-1, keepdims=True) + 1e-20)
    routing = routing * text["routed_scaling_factor"]
    output = np.zeros_like(x)
    for expert in np.unique(experts):
        name, (tokens, place) = f"{prefix}.experts.{expert}", np.nonzero(experts == expert)
        hidden = _gated(weights, name, x[tokens], text["swiglu_limit"]) * routing[tokens, place, None]
        output[tokens] += hidden @ weights[f"{name}.w2.weight"].T
    shared = f"{prefix}.shared_experts"
    output += _gated(weights, shared, x, text["swiglu_limit"]) @ weights[f"{shared}.w2.weight"].T
    return output, experts, margin
