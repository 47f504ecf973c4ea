"""The servers' configurations: their settings parse, and what they put on a chip fits, buffer by buffer.

Nothing is compiled and no array is made: weights and cache are abstract arrays of the full size on an abstract mesh.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh

from dsv41_jax import sharding
from dsv41_jax.cache import pages_for
from dsv41_jax.cache_size import cache_bytes
from dsv41_jax.config import load_config
from dsv41_jax.numerics import RELEASED
from dsv41_jax.parallel import AXES
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.sharded_step import abstract_step
from dsv41_jax.sharding import Layout
from dsv41_jax.topologies import NoCompiler, parse
from processes import ROOT

GB = 10**9
MARGIN = 0.04  # of a chip's usable memory: fragmentation, the runtime, what was forgotten here
INT32 = 2**31  # elements of an array that 32-bit offsets reach
STEP = 8192  # pages of a device by which configurations are rounded down
SAMPLER_BYTES = 48  # of a row and an id: logits, bias and counts that stay (13), logits of a step, sorted copies
# Of an image: scores of a tile of queries (vision.SCORE_BYTES), and of the patches of the largest one their hidden
# rows, as bf16 and float32, a few at a time.
VISION_BYTES = int(0.7 * GB)

# Machine, and GB of scratch, inputs, outputs and program of the largest step: a block of 512 tokens of one row of each
# device through all layers, as `test_the_largest_step` compiles it at a context of 131,072 tokens. Scratch does not
# depend on the context (v6e, all rows, encoder only: 2.81, 2.79 and 2.80 GB at 16,384, 131,072 and 1,048,576 tokens); a
# decode step takes 0.06 and 0.17 GB. Of the GPUs: all rows through the encoder, by `plan.py --topology=h200:1x8
# --phase=prefill`, which is more than a server's step.
PODS = {
    "serve_v6e16": ("v6e:4x4", 0.91),
    "serve_v5p": ("v5p:4x4x4", 7.29),
    "serve_gpu": ("h200:1x8", 2.24),
}


def config_of(name: str) -> Any:
    """The module of a configuration."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"configs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(name: str) -> ServeSettings:
    return ServeSettings.of(config_of(name).get_config().to_dict())


@functools.cache
def abstract(name: str) -> tuple[ServeSettings, Any, Any, Any]:
    """Settings, machine, parameters and cache of a pod."""
    settings, machine, config = settings_of(name), parse(PODS[name][0]), load_config(str(ROOT / "configs/flash.py"))
    numerics = RELEASED.computed_by("tpu" if machine.tpu else "gpu")
    layout = Layout.parse(settings.mesh)
    mesh = AbstractMesh(layout.sizes, AXES)
    options = {"engram": settings.engram, "expert_storage": settings.expert_storage}
    params = sharding.abstract(config, numerics, mesh, **options)
    shards = layout.data * layout.tensor
    pages = None if settings.pages is None else settings.pages // shards
    cache = sharding.abstract_cache(config, numerics, mesh, settings.rows, settings.max_len, pages)
    return settings, machine, params, cache


def rows_read(settings: ServeSettings) -> int:
    """Rows whose prompts a step reads: one of each device that has rows of its own."""
    layout = Layout.parse(settings.mesh)
    return layout.data * layout.tensor


def buffers(name: str) -> dict[str, int]:
    """Bytes of a chip, by what takes them; on the chip with the sampler."""
    settings, _, params, cache = abstract(name)
    config = load_config(str(ROOT / "configs/flash.py"))
    block = settings.prefill_block
    return {
        "weights": sharding.shard_bytes(params),
        "page pools": sharding.shard_bytes((cache.main_kv, cache.index_key)),
        "windows": sharding.shard_bytes((cache.window, cache.draft_window, cache.tail_values, cache.tail_gates)),
        "tables": sharding.shard_bytes((cache.page_table, cache.encoder_floor, cache.decoder_floor)),
        "largest step": int(PODS[name][1] * GB),
        "images": block * config.hidden_size * 4 + VISION_BYTES,
        "sampler": settings.rows * config.vocab_size * SAMPLER_BYTES,
    }


@pytest.mark.parametrize("name", ["serve_demo", *PODS])
def test_settings_parse_and_say_only_what_differs(name):
    values = config_of(name).get_config().to_dict()
    settings = ServeSettings.of(values)
    defaults = ServeSettings()
    assert {key for key, value in values.items() if value == getattr(defaults, key)} <= {"model", "rows", "max_len"}
    assert settings.host == "127.0.0.1" and settings.api_key_file is None, "open to others by a flag, not by a config"


def test_the_demo_is_what_its_docstring_says():
    module = config_of("serve_demo")
    settings, config = ServeSettings.of(module.get_config().to_dict()), load_config(str(ROOT / "configs/demo.py"))
    assert settings.max_len <= config.max_position_embeddings and settings.rows % settings.decode_rows == 0
    size = cache_bytes(config, settings.rows, settings.max_len)
    for label, nbytes in (("page pools", size.pages), ("windows", size.windows)):
        [said] = re.findall(rf"^ +{label} +([\d.]+) ", module.get_config.__doc__, re.M)
        assert float(said) == pytest.approx(nbytes / 1e6, abs=0.06)


@pytest.mark.parametrize("name", PODS)
def test_a_pod_fits_its_chips(name):
    settings, machine, _, cache = abstract(name)
    layout = Layout.parse(settings.mesh)
    assert layout.devices == machine.devices
    taken, usable = buffers(name), machine.chip.memory
    assert sum(taken.values()) <= (1 - MARGIN) * usable
    shards = layout.data * layout.tensor
    of_shard = settings.pages // shards
    assert settings.pages % shards == 0 and settings.rows % shards == 0
    assert cache.index_key["r1"]["codes"].shape[1] == settings.pages, "nothing is rounded up"
    assert of_shard >= settings.rows // shards * pages_for(settings.max_len), "every row can be as long as it may"
    # As many pages as fit: with STEP more on a device they would not, or an array would pass 32-bit offsets.
    more = 1 + STEP / of_shard
    elements = max(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(cache))
    assert elements < INT32 and of_shard % STEP == 0
    grown = sum(taken.values()) + (more - 1) * taken["page pools"]
    assert grown > (1 - MARGIN) * usable or more * elements >= INT32


@pytest.mark.parametrize("name", PODS)
def test_the_docstring_has_the_sum(name):
    """GB of 10^9 bytes, two places, each line named as in `buffers`."""
    _, machine, _, _ = abstract(name)
    taken, text = buffers(name), config_of(name).get_config.__doc__
    expected = taken | {"in all": sum(taken.values()), "usable": machine.chip.memory}
    for label, nbytes in expected.items():
        found = re.findall(rf"^ +{label} +([\d.]+)(?: |$)", text, re.M)
        assert len(found) == 1, label
        assert float(found[0]) == pytest.approx(nbytes / GB, abs=0.0051), label


def test_hosts_can_hold_their_part_of_the_tables():
    """Engram off the devices: a v6e host (ct6e-standard-4t, 720 GB) holds a quarter of 203 GB."""
    settings, machine, _, _ = abstract("serve_v6e16")
    config = load_config(str(ROOT / "configs/flash.py"))
    row = config.engram_head_dim + config.engram_head_dim // 32
    tables = sum(config.engram_num_embeddings) * row
    assert settings.engram == "host" and tables / machine.hosts == pytest.approx(50.7 * GB, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serve_v6e16", "serve_v5p"])
def test_the_largest_step(name):
    """What the compiler says it takes beside weights and cache; several minutes and 5 GB of host memory each."""
    settings, machine, _, _ = abstract(name)
    try:
        mesh = Layout.parse(settings.mesh).mesh(machine.jax_devices())
    except NoCompiler as error:
        pytest.skip(str(error))
    step = abstract_step(
        load_config(str(ROOT / "configs/flash.py")),
        RELEASED.computed_by("tpu"),
        mesh,
        phase="prefill_exact",
        batch=rows_read(settings),
        context=131_072,
        engram=settings.engram,
        block=settings.prefill_block,
    )
    with jax.set_mesh(mesh):
        traced = jax.jit(step.function, donate_argnums=step.donate, keep_unused=True).trace(*step.arguments)
        found = traced.lower().compile().memory_analysis()
    taken = found.argument_size_in_bytes + found.temp_size_in_bytes + found.generated_code_size_in_bytes
    taken += found.output_size_in_bytes - found.alias_size_in_bytes - sharding.shard_bytes(step.arguments[:2])
    assert taken / GB == pytest.approx(PODS[name][1], rel=0.02)
