"""Floating-point operations of the phases, by closed arithmetic from the configuration: what `jaxpr_flops` should find.

Maps take two operations for each parameter a token meets (`parameter_count`). To them come attention, 4 for each head,
channel and key, and index scores, 2 for each index head, channel and key. Nothing else is a product of matrices.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_map import LayerShare, layer_map
from dsv41_jax.parameter_count import DRAFT_WINDOWS, token_maps
from pallas_kernels.flops import BF16, F32, FP4, FP8, PRECISIONS

# What an operation of each precision counts in Figure 2 of the report.
REPORT_WEIGHTS = {F32: 1.0, BF16: 1.0, FP8: 0.5, FP4: 0.25}

SCORES = "index scores"
ATTENTION = "attention over keys"


def weighted(flops: Mapping[str, float], weights: Mapping[str, float] = REPORT_WEIGHTS) -> float:
    """Sum of FLOPs by precision under weights; what has no weight ("one_hot" of `jaxpr_flops.work`) counts nothing."""
    return sum(weights.get(precision, 0.0) * count for precision, count in flops.items())


@dataclasses.dataclass(frozen=True)
class Part:
    """FLOPs of a module in one precision; `stored` see `parameter_count.Map`."""

    module: str
    precision: str
    stored: str
    flops: float


@dataclasses.dataclass(frozen=True)
class Phase:
    """The arithmetic of some tokens of one sequence."""

    tokens: int
    parts: tuple[Part, ...]

    @property
    def flops(self) -> float:
        """All of them."""
        return sum(part.flops for part in self.parts)

    def by_precision(self, stored: bool = False) -> dict[str, float]:
        """FLOPs by precision of the multiplication; with `stored`, maps count by what they are stored in (experts as
        FP8): as in the project's reading of the report's Figure 2 (20.2 to 25.7 GFLOP).
        """
        total = dict.fromkeys(PRECISIONS, 0.0)
        for part in self.parts:
            total[part.stored if stored else part.precision] += part.flops
        return total

    def by_module(self) -> dict[str, float]:
        """FLOPs by module."""
        total: dict[str, float] = {}
        for part in self.parts:
            total[part.module] = total.get(part.module, 0.0) + part.flops
        return total

    def weighted(self, stored: bool = False) -> float:
        """FLOPs of a token, weighted as the report's Figure 2."""
        return weighted(self.by_precision(stored)) / self.tokens


def decode(config: ModelConfig, context: int, *, draft_windows: bool = False) -> Phase:
    """One token through all layers and the head.

    Args:
        context: tokens of the sequence, this one included.
        draft_windows: with the maps that feed the draft blocks' windows, which a step runs too.
    """
    return verify(config, context, 1, draft_windows=draft_windows)


def verify(config: ModelConfig, context: int, tokens: int | None = None, *, draft_windows: bool = False) -> Phase:
    """A committed token and its drafts through all layers, and the head for each.

    Args:
        context: tokens of the sequence with the committed one. tokens: of the block; default: one and all drafts.
    """
    tokens = 1 + config.dspark_block_size if tokens is None else tokens
    contexts = np.arange(context, context + tokens)
    return phase(config, contexts, "all", logits=tokens, draft_windows=draft_windows)


def encoder_prefill(config: ModelConfig, tokens: int) -> Phase:
    """A prompt of so many tokens through the encoder, with the hand-over to the decoder."""
    return phase(config, np.arange(1, tokens + 1), "encoder", logits=0)


def exact_prefill(config: ModelConfig, tokens: int, *, draft_windows: bool = False) -> Phase:
    """A prompt of so many tokens through all layers, and the head for the last."""
    return phase(config, np.arange(1, tokens + 1), "all", logits=1, draft_windows=draft_windows)


def phase(config: ModelConfig, contexts: np.ndarray, layers: str, *, logits: int, draft_windows: bool = False) -> Phase:
    """Any tokens of one sequence.

    Args:
        contexts: int [n], tokens that each one sees, itself included.
        layers: "all", or "encoder": with the hand-over to the decoder. logits: tokens whose logits are made.
        draft_windows: see `decode`.

    Raises:
        ValueError: no token, or one that does not see itself.
    """
    if contexts.size == 0 or contexts.min() < 1:
        raise ValueError(f"contexts={contexts}: there must be a token, and each sees itself at least")
    last = config.decoder_start if layers == "encoder" else config.num_hidden_layers
    total: dict[tuple[str, str, str], float] = {}

    def add(module: str, precision: str, stored: str, flops: float) -> None:
        key = module, precision, stored
        total[key] = total.get(key, 0.0) + float(flops)

    for each in token_maps(config):
        runs = contexts.size
        if each.module == "head":
            runs = logits
        elif each.module == DRAFT_WINDOWS:
            runs *= draft_windows
        elif each.layer >= last and not (each.source and each.layer == last):  # the hand-over
            continue
        if runs:
            add(each.module, each.precision, each.stored, 2 * each.parameters * each.uses * runs)
    for share in layer_map(config)[:last]:
        keys = np.minimum(contexts, config.sliding_window)
        if share.ratio:
            keys = keys + np.minimum(contexts // share.ratio, config.index_topk)
        width = config.num_attention_heads * config.head_dim
        add(ATTENTION, BF16, BF16, 4 * width * int(keys.sum(dtype=np.int64)))
        if scored := scored_keys(config, share, contexts):
            add(SCORES, FP4, FP4, 2 * config.index_n_heads * config.index_head_dim * scored)
    return Phase(contexts.size, tuple(Part(*key, flops) for key, flops in total.items()))


def scored_keys(config: ModelConfig, share: LayerShare, contexts: np.ndarray) -> int:
    """Index keys that a layer scores for tokens that see so many tokens [n]: all together."""
    if share.index_key_from is None:
        return 0
    keys = contexts // share.ratio
    if share.pool == "searches":
        keys = np.minimum(keys, config.candidate_topk_blocks * config.candidate_block_size)
    return int(keys.sum(dtype=np.int64))
