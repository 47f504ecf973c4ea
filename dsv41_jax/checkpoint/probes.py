"""Bytes of the released checkpoint that have been published: a download that holds other bytes there is not it."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

import numpy as np

from dsv41_jax.checkpoint.safetensors_file import TensorEntry, read_rows
from dsv41_jax.config import ModelConfig

# Of the released configuration, as `_digest` makes it.
_RELEASED_CONFIG = "6e170d15fa921769e8946581b52cb93512c2c1474ab9c9c6cbb710489d99f51c"


@dataclass(frozen=True)
class Probe:
    """The first bytes of the first row of a weight, and the first of its scale."""

    weight: str
    codes: bytes
    scale: int


PROBES = (
    Probe(
        "layers.0.attn.wkv.weight",
        bytes.fromhex("d871f2797069f0e55370eee3dcd8776d6bdc6bf25b66716b5c6d71d0eae7e062"),
        115,
    ),
    Probe("layers.0.ffn.experts.0.w1.weight", bytes.fromhex("a0a8ec4aadaf42aacc82256ffa054544"), 120),
)


def _digest(config: ModelConfig) -> str:
    plain = dataclasses.replace(config, source="").to_json()
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def is_released(config: ModelConfig) -> bool:
    """Whether `config` is the released DeepSeek-V4.1-Flash configuration (spelling and unknown keys aside)."""
    return _digest(config) == _RELEASED_CONFIG


def check_probes(entries: dict[str, TensorEntry]) -> list[str]:
    """A sentence for each probe whose bytes differ; tensors that are not in `entries` count as differing."""
    problems = []
    for probe in PROBES:
        scale_name = probe.weight.removesuffix("weight") + "scale"
        if probe.weight not in entries or scale_name not in entries:
            problems.append(f"{probe.weight}: not there, so its published bytes cannot be compared")
            continue
        codes = read_rows(entries[probe.weight], 0, 1).view(np.uint8).tobytes()[: len(probe.codes)]
        scale = int(read_rows(entries[scale_name], 0, 1).view(np.uint8)[0, 0])
        if codes != probe.codes:
            problems.append(
                f"{probe.weight}: row 0 begins {codes[:8].hex()}..., published is {probe.codes[:8].hex()}..."
            )
        if scale != probe.scale:
            problems.append(f"{scale_name}: begins with byte {scale}, published is {probe.scale}")
    return problems
