"""DeepSeek-V4.1-Flash in JAX and Flax.

import dsv41_jax as ds
model = ds.load("demo")
print(model.generate("The harbour", max_new_tokens=40, temperature=0))
"""

from dsv41_jax import cache
from dsv41_jax.cache import Cache
from dsv41_jax.chat import ChatMessage
from dsv41_jax.chat_parse import ChatDelta
from dsv41_jax.completion import Completion
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.generate import Model
from dsv41_jax.image_input import ImageInput
from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.layer_map import LayerShare, layer_map
from dsv41_jax.load import load
from dsv41_jax.runner import compilations

__all__ = [
    "Cache",
    "ChatDelta",
    "ChatMessage",
    "Completion",
    "ConfigError",
    "ImageInput",
    "LayerShare",
    "Model",
    "ModelConfig",
    "cache",
    "compilations",
    "layer_map",
    "load",
    "preprocess_image",
]
