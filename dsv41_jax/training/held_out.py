"""Held-out loss in bits per byte, through the cacheless forward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax import model
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics
from dsv41_jax.training.loss import token_nats
from dsv41_jax.training.windows import Windows, evaluation_rows


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nats(config: ModelConfig, numerics: Numerics, params: dict, batch: dict) -> Array:
    hidden, _ = model.forward(config, numerics, params, batch["token_ids"], batch["memory"], batch["segment_ids"])
    nats = token_nats(model.head(config, numerics, params, hidden), batch["targets"])
    return jnp.sum(nats * batch["weights"], axis=1)


def held_out_nats(
    config: ModelConfig, numerics: Numerics, params: dict, windows: Windows, rows: int | None = None
) -> tuple[float, int]:
    """Sum of nats over the tokens of `windows` that are targets (no BOS), and their number.

    Args:
        windows: the held-out stream with the batch shape to use.
        rows: only about so many rows, evenly spread; None means all.
    """
    pad = config.pad_token_id
    ids = evaluation_rows(windows.tokens, windows.length, pad)
    if rows is not None and rows < len(ids):
        ids = ids[np.linspace(0, len(ids) - 1, rows).astype(int)]
    total, count = 0.0, 0
    for first in range(0, len(ids), windows.batch):
        part = ids[first : first + windows.batch]
        full = np.concatenate([part, np.full((windows.batch - len(part), part.shape[1]), pad, np.int32)])
        batch = windows.make(full).arrays()
        batch["weights"] = batch["weights"] * (batch["targets"] != pad)
        total += float(np.sum(_nats(config, numerics, params, batch)))
        count += int(batch["weights"].sum())
    return total, count


def bits_per_byte(nats: float, n_bytes: float) -> float:
    """Bits per byte of text from summed nats."""
    return nats / math.log(2) / n_bytes
