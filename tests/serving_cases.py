"""What test_serving_mesh.py runs with eight devices: the engine on meshes against the same on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import dsv41_jax as ds
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.serving import memory
from dsv41_jax.serving.compiled import programs_asked_for
from dsv41_jax.serving.executor import Executor
from dsv41_jax.serving.loop import Loop
from dsv41_jax.serving.request import GenerationRequest
from dsv41_jax.serving.scheduler import Scheduler
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.serving.task import Task
from dsv41_jax.serving.warm_up import warm_up
from mesh_cases import mesh_of
from random_configs import random_legal_config
from random_models import random_token_map, write_model
from test_serving_loop import Sink

SEED = 45  # sources of both ratios, a candidate pool, Engram; encoder-only prefill
LENGTHS = (1, 40, 17, 130, 16, 90, 33)


def texts(folder: Path, mesh_name: str | None, engram: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities of seven requests, six rows at once."""
    mesh = None if mesh_name is None else mesh_of(mesh_name)
    config = random_legal_config(SEED)
    model = ds.load(folder, mesh, numerics="float32", token_map=random_token_map(config, SEED), engram=engram)
    runner = model._runner
    settings = ServeSettings(rows=6, max_len=256, pages=16, decode_rows=2)
    size = memory.cache_size(settings, model.config, runner.numerics, mesh)
    executor = Executor(runner, size, block=16, tile=None if mesh is not None else 2)
    loop = Loop(executor, Scheduler(size, 8), None, 0.05)
    warm_up(loop, progress=False)
    before, rng, tasks = programs_asked_for(), np.random.default_rng(1), []
    for i, n in enumerate(LENGTHS):
        ids = rng.integers(3, model.config.vocab_size, n).astype(np.int32)
        sampling = SamplingOptions(temperature=float(i % 2), seed=i)
        request = GenerationRequest(str(i), ids, sampling, 6, frozenset(), Sink(), logprobs=0)
        tasks.append(Task(request, i, 0.0))
        loop.scheduler.add(tasks[-1])
    while loop.tasks():
        loop.round()
    assert programs_asked_for() == before, "compiled after warm-up"
    assert loop.scheduler.pool.all_free == size.pages * size.shards
    sinks = [task.request.sink for task in tasks]
    return [(sink.tokens, [each.logprob for each in sink.logprobs]) for sink in sinks]


def same_texts(*meshes_and_engrams: str) -> None:
    """Each argument: a mesh and where Engram tables are, "2x1x2:device"."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_model(folder, random_legal_config(SEED), SEED)
        expected = texts(folder, None, "device")
        for case in meshes_and_engrams:
            found = texts(folder, *case.split(":"))
            for (tokens, logprobs), (want, numbers) in zip(found, expected, strict=True):
                assert tokens == want, case
                np.testing.assert_allclose(logprobs, numbers, atol=1e-4, err_msg=case)
