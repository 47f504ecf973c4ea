"""Fresh parameters: the float32 pytree of a configuration, one table of initialisers by the tensor's name.

The network starts as a plain residual stream: all four copies carry the embedding, each sublayer reads (mostly) one of
them and adds its output to all, nothing is mixed between copies, and the last matrix of every sublayer is zero.
"""

import math
import re

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import FLOAT32

READ_ONE, READ_OTHERS = 1.0, -2.3  # sigmoids 0.73 and 0.09: one stream and a little of the three others
KEEP_STREAM = 5.0  # logit of the diagonal of comb: softmax 0.98


def _normal(std: float):
    return lambda key, shape, config: std * jax.random.normal(key, shape, jnp.float32)


def _fan_in(gain: float):
    return lambda key, shape, config: gain / math.sqrt(shape[-1]) * jax.random.normal(key, shape, jnp.float32)


def _ones(key: Array, shape: tuple[int, ...], config: ModelConfig) -> Array:
    return jnp.ones(shape, jnp.float32)


def _zeros(key: Array, shape: tuple[int, ...], config: ModelConfig) -> Array:
    return jnp.zeros(shape, jnp.float32)


def _hc_base(key: Array, shape: tuple[int, ...], config: ModelConfig) -> Array:
    """[layers, (2 + C) C]: pre favours stream (layer mod C), post adds to all, comb keeps every stream apart."""
    c = config.hc_mult
    reads = jnp.where(jnp.arange(shape[0])[:, None] % c == jnp.arange(c), READ_ONE, READ_OTHERS)
    comb = jnp.broadcast_to(KEEP_STREAM * jnp.eye(c).reshape(-1), (shape[0], c * c))
    return jnp.concatenate([reads, jnp.zeros((shape[0], c)), comb], axis=1).astype(jnp.float32)


# First match of the dotted path wins.
INITIALISERS = (
    (r"hc_\w+\.fn", _normal(0.01)),
    (r"hc_\w+\.base", _hc_base),
    (r"hc_\w+\.scale", lambda key, shape, config: jnp.full(shape, 0.1, jnp.float32)),
    (r"(norm|\w+_norm)\.weight$|[qk]_weight$", _ones),
    (r"attn_sink$|bias(_vl)?$", _zeros),
    (r"wo_b\.weight$|w2\.weight$", _zeros),
    (r"confidence_head\.proj\.weight$|markov_head\.head\.weight$", _zeros),
    (r"engram\.\w+\.embed\.weight$", _normal(0.1)),
    (r"embed\.weight$", _normal(0.1)),
    (r"^head\.weight$", _normal(0.02)),
    (r"gate\.weight$", _normal(0.02)),
    (r"weight$|image_\w+$", _fan_in(0.7)),
)


def init_params(config: ModelConfig, key: Array) -> dict:
    """Parameters float32, laid out as `load_params` lays them out. Deterministic in `key`, tensor by tensor."""
    leaves = {}
    for path, leaf in flatten(abstract_params(config, FLOAT32)):
        name = ".".join(path)
        initialise = next(f for pattern, f in INITIALISERS if re.search(pattern, name))
        own = jax.random.fold_in(key, sum(ord(c) * 31**i for i, c in enumerate(name)) % (1 << 31))
        leaves[path] = initialise(own, leaf.shape, config)
    return nest(leaves)
