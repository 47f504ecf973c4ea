"""What training keeps of a router's choice: the sequence balance loss, loads by modality, dropped pairs.

Everything is a sum over tokens, so that devices, rows and packed samples add up to what one long run would give.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

TEXT, IMAGE = MODALITIES = (0, 1)


@flax.struct.dataclass
class TokenFacts:
    """What the experts of a training step must know of its tokens.

    Attributes:
        samples: int32 [B, T], number of a token's sample in its row, 0 <= number < T, in any order.
        weights: float32 [B, T], 1 for a token and 0 for padding. A sample's last token and image tokens count here,
            though the language loss leaves them out.
    """

    samples: Array
    weights: Array


@flax.struct.dataclass
class RouterNotes:
    """What one layer's experts report of a training step.

    Attributes:
        experts: int32 [B, T, k], chosen, ascending.
        loads: float32 [2, E], tokens of each expert by modality (text, image), padding left out.
        balance: float32 [], see `sequence_balance`.
        dropped: int32 [], (token, slot) pairs that were routed, padding's too, less those whose output came back from
            an expert. Always 0; None where weights in a stored form computed, which count nothing.
    """

    experts: Array
    loads: Array
    balance: Array
    dropped: Array | None


def sequence_balance(scores: Array, experts: Array, samples: Array, weights: Array) -> Array:
    """Sequence balance loss of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), summed over tokens: float32 [].

    Of a sample s with tokens of total weight T_s: T_s * sum_i f_i P_i, where f_i = E / (k T_s) * (weight of the tokens
    that chose i) is a constant to the gradient and P_i is the mean over its tokens of score_i / sum_j score_j. Even
    routing gives T_s. Whoever sums over rows and devices divides by the total weight.

    Args:
        scores: float32 [B, T, E], positive, without the selection bias. experts: int32 [B, T, k].
        samples, weights: see `TokenFacts`.
    """
    (t, n_experts), k = scores.shape[1:], experts.shape[-1]
    shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20) * weights[..., None]

    def one_row(shares: Array, experts: Array, samples: Array, weights: Array) -> Array:
        total = jax.ops.segment_sum(weights, samples, t)  # [samples]
        chosen = jnp.zeros((t, n_experts), jnp.float32).at[samples[:, None], experts].add(weights[:, None])
        frequency = chosen * (n_experts / k / jnp.maximum(total, 1.0))[:, None]  # [samples, E]
        return jnp.sum(jax.lax.stop_gradient(frequency)[samples] * shares)

    return jnp.sum(jax.vmap(one_row)(shares, experts, samples, weights.astype(jnp.float32)))


def modality_loads(experts: Array, image_mask: Array | None, weights: Array, n_experts: int) -> Array:
    """Tokens of each expert by modality, float32 [2, E].

    Args:
        experts: int32 [B, T, k]. image_mask: bool [B, T], or None where all is text. weights: float32 [B, T].
    """
    modality = jnp.zeros(weights.shape, jnp.int32) if image_mask is None else image_mask.astype(jnp.int32)
    place = modality[..., None] * n_experts + experts
    counts = jnp.zeros(len(MODALITIES) * n_experts, jnp.float32).at[place].add(weights[..., None].astype(jnp.float32))
    return counts.reshape(len(MODALITIES), n_experts)
