"""The demo model without Engram, for the comparison in dsv41_jax/demo_model/README.md."""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """`configs/demo.py` without n-gram tables."""
    config = runpy.run_path(str(Path(__file__).with_name("demo.py")))["get_config"]()
    config.text_config.engram_layer_ids = []
    config.text_config.engram_num_embeddings = []
    return config
