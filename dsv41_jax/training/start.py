"""Where a run begins: the weights of a released or an Orbax folder, or fresh ones, as float32 masters."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41_jax import sharding
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.checkpoint.released import load_params
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.load import token_map_of
from dsv41_jax.model_folder import find_folder
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.init import init_params
from dsv41_jax.training.train_settings import FRESH, TrainSettings


@dataclasses.dataclass(frozen=True)
class Start:
    """A model before it is trained.

    Attributes:
        config: its configuration. token_map: int [vocab] for Engram, None without.
        text: folder of its tokenizer or token map, for the export; None if it has neither.
        source: what its weights are read from; None for fresh ones.
    """

    config: ModelConfig
    token_map: np.ndarray | None
    text: Path | None
    source: TensorSource | None

    def params(self, seed: int, mesh: Mesh | None) -> dict:
        """Float32 parameters, on a mesh in their shards."""
        if self.source is not None:
            read = load_params if mesh is None else functools.partial(sharding.restore, mesh=mesh)
            return read(self.source, FLOAT32)
        make = functools.partial(init_params, self.config)
        key = jax.random.key(seed)
        return jax.jit(make)(key) if mesh is None else sharding.init(make, key, mesh)

    def shapes(self, mesh: Mesh | None) -> dict:
        """The parameters as ShapeDtypeStructs, on a mesh with shardings."""
        if mesh is not None:
            return sharding.abstract(self.config, FLOAT32, mesh)
        return jax.eval_shape(functools.partial(init_params, self.config), jax.random.key(0))


def find_start(settings: TrainSettings) -> Start:
    """Open what `settings.model` names; no weights are read yet.

    Raises:
        FileNotFoundError: no such file or folder. ValueError: a folder that is no model, or no token map for Engram.
    """
    if not settings.model.startswith(FRESH):
        folder = find_folder(settings.model, settings.revision)
        source = open_folder(folder)
        text = _tokenizer(settings) or folder
        return Start(source.config, _token_map(source.config, text), text, source)
    path = Path(settings.model.removeprefix(FRESH))
    if not path.is_file():
        raise FileNotFoundError(f"model={settings.model!r}: there is no file {path}")
    config = load_config(path)
    text = _tokenizer(settings)
    if text is None and config.engram_layer_ids:
        raise ValueError(
            f"model={settings.model!r} has Engram layers: tokenizer must name a folder with tokenizer.json or "
            "token_map.npy"
        )
    return Start(config, _token_map(config, text), text, None)


def _tokenizer(settings: TrainSettings) -> Path | None:
    if settings.tokenizer is None:
        return None
    if not Path(settings.tokenizer).is_dir():
        raise FileNotFoundError(f"tokenizer={settings.tokenizer!r}: no such folder")
    return Path(settings.tokenizer)


def _token_map(config: ModelConfig, text: Path | None) -> np.ndarray | None:
    return token_map_of(text) if config.engram_layer_ids else None
