"""What is run with eight devices by test_mesh_model.py: models spread over meshes against the same on one device."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np

import dsv41_jax as ds
from dsv41_jax import sharding

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = np.array([50, 23, 37])  # of no mesh's rows a multiple
STEPS = 3


def mesh_of(name: str) -> jax.sharding.Mesh:
    layout = sharding.Layout.parse(name)
    return layout.mesh(jax.devices()[: layout.devices])


def tiny(mesh: jax.sharding.Mesh | None, numerics: str, **options) -> ds.Model:
    token_map = np.load(GOLDEN / "tinyA_token_map.npz")["token_map"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(GOLDEN / "tinyA_config.json", Path(folder) / "config.json")
        shutil.copy(GOLDEN / "tinyA_model.safetensors", Path(folder) / "model.safetensors")
        model = ds.load(folder, numerics=numerics, token_map=token_map, mesh=mesh, **options)
    model._runner.prefill_block = 16
    return model


def outputs(model: ds.Model, mode: str) -> dict[str, np.ndarray]:
    """Logits of prompts, of single tokens, of a block; drafts: of three rows of unequal length."""
    random = np.random.default_rng(0)
    ids = random.integers(3, 499, (3, LENGTHS.max())).astype(np.int32)
    logits, cache = model.prefill(ids, LENGTHS, mode=mode)
    result = {"prefill": logits}
    for step in range(STEPS):
        result[f"decode {step}"], cache = model.decode(cache, random.integers(3, 499, 3).astype(np.int32))
    result["verify"], cache = model.decode(cache, random.integers(3, 499, (3, 5)).astype(np.int32))
    cache = cache.rewind(cache.lengths - 3)
    _, result["draft logits"], result["confidence"] = model.draft(cache, np.array([7, 8, 9], np.int32))
    return {name: np.asarray(value) for name, value in result.items()}


def float32(mesh: str, mode: str) -> None:
    """Sums of experts' outputs are in another order, nothing else: 1e-5 of logits up to 20."""
    wanted, got = outputs(tiny(None, "float32"), mode), outputs(tiny(mesh_of(mesh), "float32"), mode)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, rtol=0, err_msg=name)


def greedy_text(mesh: str) -> None:
    """The demo continues prompts of unequal length with the same text, with and without drafts."""
    prompts = ["The harbour", "A storm came over the hills and", "In"]
    options = {"max_new_tokens": 12, "temperature": 0, "prefill_mode": "exact"}
    texts = []
    for where in (None, mesh_of(mesh)):
        model = ds.load("demo", numerics="float32", mesh=where)
        model._runner.prefill_block = 16
        texts.append(model.generate(prompts, **options) + model.generate(prompts[:1], speculate=True, **options))
    assert texts[0] == texts[1], texts
