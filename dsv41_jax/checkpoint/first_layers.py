"""Runs the first layers of a checkpoint on a fixed short sequence, loading nothing else of it.

The configuration is cut down to those layers and their tensors are loaded through the usual reader; of the embedding
and the Engram tables only the rows that the sequence needs are read. The layers then run in `model.forward`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import model
from dsv41_jax.checkpoint.names import name_map
from dsv41_jax.checkpoint.released import load_params
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import TensorEntry, read_rows
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.numerics import Numerics

TOKENS = 8
_STACKS = ("layers", "compressors", "indexers", "engram")  # subtrees of the parameters
_STEP = 7919  # a prime: the ids spread over the vocabulary


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of one array: root mean square, largest magnitude, share of zeros, whether all is finite."""

    what: str
    rms: float
    largest: float
    zeros: float
    finite: bool

    def __str__(self) -> str:
        return f"{self.what}: rms {self.rms:.4g}, max {self.largest:.4g}, zeros {100 * self.zeros:.2f}%"


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer: the mean of its input streams, its normed attention input, how many experts its tokens chose."""

    layer: int
    stream: Statistics
    attention: Statistics
    experts: int


def statistics(what: str, values: np.ndarray) -> Statistics:
    """Statistics of an array of any float type."""
    v = np.asarray(values).astype(np.float64)
    finite = bool(np.isfinite(v).all())
    return Statistics(what, float(np.sqrt(np.mean(v * v))), float(np.abs(v).max()), float(np.mean(v == 0)), finite)


def cut_config(config: ModelConfig, layers: int) -> ModelConfig:
    """The configuration of the first `layers` layers alone: no drafts, no vision, every layer tapped.

    ConfigError if they do not stand alone (Engram layers listed out of order).
    """
    engram = [(i, n) for i, n in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True) if i < layers]
    source = config.candidate_source_layer_id
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=config.backbone_ratios[:layers],
        kv_source_layer_ids=tuple(i for i in config.kv_source_layer_ids if i < layers),
        index_source_layer_ids=tuple(i for i in config.index_source_layer_ids if i < layers),
        candidate_source_layer_id=source if source is not None and source < layers else None,
        engram_layer_ids=tuple(i for i, _ in engram),
        engram_num_embeddings=tuple(n for _, n in engram),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=tuple(range(layers)),
        vision=None,
        source="",
    )


def needed_tensors(config: ModelConfig) -> list[str]:
    """Released names that a cut-down configuration needs: all but the head."""
    places = name_map(config).places
    return ["embed.weight", *(name for name, place in places.items() if place.path[0] in _STACKS)]


def fixed_tokens(config: ModelConfig) -> np.ndarray:
    """int32 [1, TOKENS]: BOS, then ids spread over the vocabulary."""
    return np.array([[config.bos_token_id, *(_STEP * i % config.vocab_size for i in range(1, TOKENS))]], np.int32)


def run_first_layers(
    folder: ReleasedFolder, layers: int, numerics: Numerics, token_map: np.ndarray | None
) -> tuple[list[LayerReport], Statistics]:
    """Run the layers; a report of each, and the statistics of what leaves the last one.

    Memory: about 1.7 times the layers' stored bytes, because the stacked leaves are taken apart, and what the chosen
    experts take when widened. In the released model that is 13 GB a layer and about 10 GB once.

    Args:
        folder: the whole checkpoint; its `entries` need to hold the tensors of these layers only.
        layers: how many, at most the model's.
        token_map: int [vocab], needed if an Engram layer is among them.

    Raises:
        ConfigError: the layers do not stand alone. KeyError: a tensor that is needed is not among the entries.
            CheckpointError: a tensor cannot be read.
    """
    config = cut_config(folder.config, layers)
    for name in needed_tensors(config):
        folder.entries[name]  # before anything is allocated
    part = ReleasedFolder(folder.path, config, folder.entries)
    params = load_params(part, numerics, engram="mmap", only=lambda path: path[0] in _STACKS)
    ids = fixed_tokens(config)
    distinct, place = np.unique(ids, return_inverse=True)
    params["embed"] = {"weight": _rows(folder.entries["embed.weight"], distinct)}
    memory = {}
    if config.engram_layer_ids:
        rows, _ = EngramHasher(config, token_map)(ids)
        for i, layer in enumerate(config.engram_layer_ids):
            memory[f"l{layer}"] = jnp.asarray(part.engram_table(layer, "mmap", numerics.dtype).rows(rows[i]))
    options = ForwardOptions(rolled=False, attention_inputs=True)
    forward = jax.jit(functools.partial(model.forward, config, numerics, options=options))
    hidden, notes = forward(params, jnp.asarray(place.reshape(ids.shape), jnp.int32), memory)
    reports = [
        LayerReport(
            layer,
            statistics("stream", notes["taps"][layer]),
            statistics("attention input", notes["attn_in"][layer]),
            len(np.unique(notes["experts"][layer])),
        )
        for layer in range(layers)
    ]
    return reports, statistics(f"after layer {layers - 1}", hidden)


def _rows(entry: TensorEntry, ids: np.ndarray) -> jax.Array:
    return jnp.asarray(np.concatenate([read_rows(entry, i, i + 1) for i in ids.tolist()]))
