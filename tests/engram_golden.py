"""The Engram golden file and the configs it was made with, for the three Engram test modules."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from dsv41_jax.config import ModelConfig

GOLDEN = Path(__file__).parent / "golden"
BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
SUFFIXES = {"__bf16": BF16, "__e4m3": E4M3, "__e8m0": E8M0}


def load_golden() -> dict[str, np.ndarray]:
    arrays = {}
    with np.load(GOLDEN / "engram.npz") as file:
        for name in file.files:
            suffix = next((s for s in SUFFIXES if name.endswith(s)), "")
            array = file[name]
            arrays[name.removesuffix(suffix)] = array.view(SUFFIXES[suffix]) if suffix else array
    return arrays


GOLD = load_golden()
FACTS = json.loads((GOLDEN / "engram.json").read_text())


def config_of(layout: str) -> ModelConfig:
    """The released config, or tiny A's with the layout called `small` in engram.json."""
    if layout == "released":
        return ModelConfig.from_json(GOLDEN / "released_config.json")
    mapping = json.loads((GOLDEN / "tinyA_config.json").read_text())
    for key, value in FACTS["small"]["args"].items():
        mapping["text_config"]["engram_pad_token_id" if key == "engram_pad_id" else key] = value
    return ModelConfig.from_json(mapping)


def token_map_of(layout: str) -> np.ndarray:
    return GOLD["tokenizer.token_map"] if layout == "released" else np.arange(512) % 40


def module_case(name: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{name}."): value for key, value in GOLD.items() if key.startswith(f"{name}.")}


def table_of(gold: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"weight": gold["w.embed.weight"], "scale": gold["w.embed.scale"]}
