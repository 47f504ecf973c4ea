"""The engine on a whole small model: its texts are those of plain calls, and do not depend on what else runs."""

from __future__ import annotations

import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax.image_input import ImageInput, expand_placeholders
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.serving.compiled import programs_asked_for
from dsv41_jax.serving.executor import CacheSize, Executor
from dsv41_jax.serving.loop import Loop
from dsv41_jax.serving.request import GenerationRequest
from dsv41_jax.serving.scheduler import Scheduler
from dsv41_jax.serving.task import Task
from dsv41_jax.serving.warm_up import warm_up
from random_configs import random_legal_config
from random_models import random_token_map, write_model
from test_serving_loop import Sink

VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "rope_theta": 10000,
    "downsample_ratio": 2,
    "max_image_tokens": 32,
    "min_pixels": 64,
}
SIZE = CacheSize(rows=8, max_len=256, pages=12)
GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ds.Model:
    """Sources of both ratios, a candidate pool, Engram, a draft block; the released arithmetic."""
    folder = tmp_path_factory.mktemp("serving") / "model"
    config = random_legal_config(45)
    write_model(folder, config, 45)
    return ds.load(folder, numerics="released", token_map=random_token_map(config, 45))


@pytest.fixture(scope="module")
def executor(model) -> Executor:
    return Executor(model._runner, SIZE, block=16, tile=4)


class Crowd:
    """A loop of its own on the shared executor."""

    def __init__(self, executor: Executor, pages: int = SIZE.pages, reserve: int = 1):
        executor.size = CacheSize(SIZE.rows, SIZE.max_len, pages)
        self.scheduler = Scheduler(executor.size, reserve)
        self.loop = Loop(executor, self.scheduler, None, 0.05)
        self.tasks: list[Task] = []

    def ask(self, prompt: np.ndarray, most: int, **more) -> Task:
        name = str(len(self.tasks))
        options = {"sampling": GREEDY, "logprobs": 3} | more
        request = GenerationRequest(name, prompt, max_new_tokens=most, stop_ids=frozenset(), sink=Sink(), **options)
        self.tasks.append(Task(request, len(self.tasks), 0.0))
        self.scheduler.add(self.tasks[-1])
        return self.tasks[-1]

    def run(self) -> None:
        while self.loop.tasks():
            self.loop.round()


def text(task: Task) -> tuple[list[int], list]:
    return task.request.sink.tokens, task.request.sink.logprobs


def prompts(model: ds.Model) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, model.config.vocab_size, n).astype(np.int32) for n in (1, 5, 16, 17, 40, 130, 200)]


@pytest.fixture(scope="module")
def alone(model, executor) -> list:
    """Each prompt's text when nothing else runs."""
    found = []
    for prompt in prompts(model):
        crowd = Crowd(executor)
        found.append(text(crowd.ask(prompt, 12)))
        crowd.run()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> ds.Model:
    """In float32, where block lengths and rows make no visible difference; it takes images."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    config = random_legal_config(45) | {"image_token_id": 2, "vision_config": VISION}
    write_model(folder, config, 45)
    loaded = ds.load(folder, numerics="float32", token_map=random_token_map(config, 45))
    loaded._runner.prefill_block = 16
    return loaded


@pytest.fixture(scope="module")
def plain_executor(plain) -> Executor:
    return Executor(plain._runner, SIZE, tile=4)


def test_texts_of_plain_calls(plain, plain_executor):
    crowd = Crowd(plain_executor)
    tasks = [crowd.ask(prompt, 6) for prompt in prompts(plain)[:5]]
    crowd.run()
    for task in tasks:
        logits, cache = plain.prefill(task.request.token_ids[None], mode="ced", max_len=256)
        for token, reported in zip(*text(task), strict=True):
            row = np.asarray(logits)[0]
            assert int(row.argmax()) == token
            assert reported.logprob == pytest.approx(row[token] - np.logaddexp.reduce(row), abs=1e-4)
            logits, cache = plain.decode(cache, [token])


def test_a_text_does_not_depend_on_its_neighbours(model, executor, alone):
    """To the last bit of the log probabilities; in other rows, at other times."""
    crowd = Crowd(executor)
    crowd.ask(prompts(model)[4][:30], 60, sampling=SamplingOptions(temperature=1.0, seed=5))
    tasks = [crowd.ask(prompt, 12) for prompt in reversed(prompts(model))]
    crowd.run()
    assert [text(task) for task in reversed(tasks)] == alone


def test_a_text_that_began_again_is_the_same(model, executor):
    crowd = Crowd(executor, pages=6)
    prompt, options = prompts(model)[4], {"sampling": SamplingOptions(temperature=1.0, seed=9, presence_penalty=0.5)}
    tasks = [crowd.ask(prompt, 150, **options, stream=i) for i in range(4)]  # two pages each, and a third is not free
    tasks.append(crowd.ask(prompt, 100, batch_invariant=False, **options, stream=9))
    crowd.run()
    assert crowd.loop.counters.preempted > 0
    roomy = Crowd(executor)
    again = [roomy.ask(prompt, 150, **options, stream=i) for i in range(4)]
    roomy.run()
    assert roomy.loop.counters.preempted == 0
    assert [text(task) for task in again] == [text(task) for task in tasks[:4]]
    assert len({tuple(task.request.sink.tokens) for task in again}) == 4  # samples differ
    assert len(tasks[4].request.sink.tokens) == 100


def test_nothing_is_compiled_after_warm_up(model):
    executor = Executor(model._runner, SIZE, block=16, tile=4)
    crowd = Crowd(executor)
    seconds = warm_up(crowd.loop, progress=False)
    assert seconds > 0
    before = programs_asked_for()
    for i, prompt in enumerate(prompts(model)):
        crowd.ask(prompt, 3 + i, logprobs=None if i % 2 else i, sampling=SamplingOptions(top_p=0.9, seed=i))
    crowd.run()
    assert programs_asked_for() == before
    assert executor.size.pages == crowd.scheduler.pool.all_free


@pytest.mark.slow
def test_images_are_read(plain, plain_executor):
    """A prompt with an image: as `prefill` reads it. Another image makes another text."""
    rng, patch = np.random.default_rng(0), VISION["patch_size"]
    crowd = Crowd(plain_executor)
    asked = []
    for _ in range(2):
        patches = rng.uniform(-1, 1, (16, 3, patch, patch)).astype(np.float32)
        ids, images = expand_placeholders([5, 6, 2, 9, 11, 12], [(patches, (4, 4))], plain.config)
        assert isinstance(images[0], ImageInput)
        asked.append((crowd.ask(ids, 4, images=tuple(images)), ids, images))
    crowd.run()
    for task, ids, images in asked:
        logits, _ = plain.prefill(ids[None], mode="ced", images=[images], max_len=256)
        row = np.asarray(logits)[0]
        token, reported = (part[0] for part in text(task))
        assert token == int(row.argmax())
        assert reported.logprob == pytest.approx(row[token] - np.logaddexp.reduce(row), abs=1e-4)
    assert text(asked[0][0]) != text(asked[1][0])
