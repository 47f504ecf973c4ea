"""The two ends of the vocabulary: token embeddings and logits. Their matrices may be split over devices by columns."""

from typing import Any

from jax import Array

from dsv41_jax.config import ModelConfig
from dsv41_jax.norms import RMSNorm
from dsv41_jax.numerics import Numerics, project_rows

Params = dict[str, Any]


def embed_ids(config: ModelConfig, numerics: Numerics, params: Params, token_ids: Array) -> Array:
    """Embeddings [B, t, D] of token ids [B, t] in the activation dtype."""

    def lookup(ids: Array) -> Array:
        return params["embed"]["weight"][ids].astype(numerics.dtype)

    return numerics.parallel.by_columns(lookup, token_ids, config.hidden_size, block=1)


def logits_of(config: ModelConfig, numerics: Numerics, params: Params, hidden: Array, norm: Params) -> Array:
    """Logits float32 [..., V] of hidden states [..., D], normed first by `norm`."""
    h = RMSNorm(config.rms_norm_eps, numerics).apply({"params": norm}, hidden)
    return by_vocabulary(config, numerics, params["head"], h)


def by_vocabulary(config: ModelConfig, numerics: Numerics, matrix: Params, x: Array) -> Array:
    """x [..., n] times a matrix {"weight" [V, n]} -> float32 [..., V]."""

    def project(x: Array) -> Array:
        return project_rows(x, matrix["weight"].astype(numerics.dtype))

    return numerics.parallel.by_columns(project, x, config.vocab_size, block=1)
