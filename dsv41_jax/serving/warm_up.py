"""Compiles every program that serving can need, before the first request."""

from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from dsv41_jax.image_plan import vision_config
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.serving.loop import Loop
from dsv41_jax.serving.steps import Block, EmbedImage, SetRows

_MEASURED = 3  # runs of a block, of which the quickest counts


def warm_up(loop: Loop, progress: bool = True) -> float:
    """Run each program once, with rows that count for nothing.

    Returns:
        seconds that one block of a prompt takes, the slowest of its kinds: no bound on stalls can be shorter.
    """
    work = _programs(loop)
    with tqdm(work, desc="compiling", unit="program", disable=not progress) as bar:
        for name, run in bar:
            bar.set_postfix_str(name)
            run()
            loop.executor.wait()
    slowest = 0.0
    for name, run in work:
        if name.startswith("prompt"):
            slowest = max(slowest, min(_seconds(loop, run) for _ in range(_MEASURED)))
    return slowest


def _seconds(loop: Loop, run: Callable[[], None]) -> float:
    began = loop.clock()
    run()
    loop.executor.wait()
    return loop.clock() - began


def _programs(loop: Loop) -> list[tuple[str, Callable[[], None]]]:
    executor, config = loop.executor, loop.config
    size = executor.size
    together = executor.runner.mesh is not None

    def block(height: int, tokens: int, layers: str, images: bool = False) -> None:
        engram = None
        if loop.hasher is not None:
            engram = loop.hasher.hash(loop.hasher.compress(np.zeros((height, tokens), np.int32)))
        none, shape = np.zeros(height, np.int32), (height, tokens, config.hidden_size)
        mask = np.zeros((height, tokens), bool) if images else None
        embeds = np.zeros(shape, executor.runner.numerics.dtype) if images else None
        ids = np.zeros((height, tokens), np.int32)
        own = none if together and tokens > 1 else None
        logits = loop.run(Block(0, layers, ids, none, none, none, engram, None, mask, embeds, own))
        if logits is not None:
            loop.sampler.put(logits, np.full(height, -1))

    def set_rows() -> None:
        loop.run(SetRows(np.zeros(1, np.int32), np.zeros((1, size.per_row), np.int32), np.zeros((2, 1), np.int32)))

    height = size.shards if together else 1
    work: list[tuple[str, Callable[[], None]]] = [("page tables", set_rows)]
    kinds = ("encoder", "all") if config.supports_ced else ("all",)
    for images in (False, True) if config.vision is not None else (False,):
        for layers in kinds:
            name = f"prompt, {layers}{', images' if images else ''}"
            work.append((name, lambda layers=layers, images=images: block(height, executor.block, layers, images)))
    if config.vision is not None:
        work.append(("image", lambda: _image(loop)))
    work.append(("decode", lambda: block(executor.tile, 1, "all")))
    work.append(("sampling", lambda: _sampling(loop)))
    return work


def _image(loop: Loop) -> None:
    patch = vision_config(loop.config).patch_size
    side = vision_config(loop.config).downsample_ratio
    loop.run(EmbedImage(np.zeros((side * side, 3, patch, patch), np.float32), (side, side)))


def _sampling(loop: Loop) -> None:
    sampler = loop.sampler
    nobody, none = np.zeros(sampler.rows, bool), np.zeros(sampler.rows, np.int32)
    sampler.start(0, SamplingOptions(), 0, np.zeros(1, np.int32), [])
    tokens = sampler.choose(nobody, none, None)
    sampler.choose(nobody, none, np.full((sampler.rows, -(-sampler.vocab // 32)), 0xFFFFFFFF, np.uint32))
    sampler.logprobs(tokens, {0: 1})
