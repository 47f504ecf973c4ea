"""Whether a server fits, before anything is loaded: every buffer counted, on the fullest of its devices.

What a step takes beside weights and cache is asked of the compiler, where there is an accelerator: its largest step is
compiled first (and found again in the compilation cache at the next start). On a CPU it is the bound that the plain
code keeps.
"""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from dsv41_jax import sharding
from dsv41_jax.config import ModelConfig
from dsv41_jax.mesh_layout import Layout
from dsv41_jax.numerics import Numerics
from dsv41_jax.runner import step_sizes
from dsv41_jax.serving.executor import CacheSize, decode_tile
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.sharded_step import AbstractStep, abstract_step
from dsv41_jax.tiles import TEMPORARY_BYTES
from dsv41_jax.vision import SCORE_BYTES

_SAMPLER_BYTES = 4 + 1 + 4 + 4  # of a row and id: bias, seen in the prompt, count, logits
_SAMPLING_COPIES = 4  # float32 [rows, V] beside them while tokens are drawn: penalised, warm, sorted, noise
_SHOWN = 10**6


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
        parts: {what: bytes}. limit: bytes that a program may use there, or None where the device does not say.
    """

    parts: dict[str, int]
    limit: int | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        lines = [f"{what:<34}{size / _SHOWN:>12,.1f} MB" for what, size in self.parts.items()]
        lines.append(f"{'together, a device':<34}{self.total / _SHOWN:>12,.1f} MB")
        if self.limit is not None:
            lines.append(f"{'a device has':<34}{self.limit / _SHOWN:>12,.1f} MB")
        return "\n".join(lines)


def cache_size(settings: ServeSettings, config: ModelConfig, numerics: Numerics, mesh: Mesh | None) -> CacheSize:
    """The cache that the settings ask for; rows and pages are rounded up to what the devices of a mesh can share.

    Raises:
        ValueError: more tokens than the model has positions, or rows that no decode step takes.
    """
    if settings.max_len > config.max_position_embeddings:
        raise ValueError(
            f"max_len={settings.max_len}: the model has positions for {config.max_position_embeddings} tokens"
        )
    size = CacheSize(settings.rows, settings.max_len, 1)
    if mesh is None:
        pages = settings.rows * size.per_row if settings.pages is None else settings.pages
        decode_tile(settings.rows, settings.decode_rows or step_sizes(numerics)[1])
        return dataclasses.replace(size, pages=pages)
    layout = sharding.layout_of(mesh)
    rows, shards = sharding.padded_rows(settings.rows, layout), layout.data * layout.tensor
    own = rows // shards * size.per_row if settings.pages is None else -(-settings.pages // shards)
    return CacheSize(rows, settings.max_len, sharding.pages_of_shard(config, numerics, own), shards)


def plan_memory(
    config: ModelConfig,
    numerics: Numerics,
    size: CacheSize,
    mesh: Mesh | None,
    *,
    engram: str,
    expert_storage: str,
    block: int | None = None,
    dispatch: str | None = None,
    limit: int | None = None,
) -> MemoryPlan:
    """What one device will hold.

    Args:
        mesh: None: everything on one device. engram, expert_storage, dispatch: as `dsv41_jax.load`.
        block: tokens of a prompt that a step reads; None as `Runner`'s.
        limit: default: what the first device of this process says.

    Raises:
        ValueError: the compiler says that the largest step cannot fit, whatever else there is.
    """
    placed = Layout().mesh(jax.devices()[:1]) if mesh is None else mesh
    params = sharding.abstract(config, numerics, placed, engram=engram, expert_storage=expert_storage)
    cache = sharding.abstract_cache(config, numerics, placed, size.rows, size.max_len, size.pages)
    kinds = {"page pools": (cache.main_kv, cache.index_key)}
    kinds["windows and compressor tails"] = (cache.window, cache.draft_window, cache.tail_values, cache.tail_gates)
    kinds["page tables"] = (cache.page_table, cache.encoder_floor, cache.decoder_floor)
    cells = size.rows * config.vocab_size
    parts = {name: sharding.shard_bytes(tree) for name, tree in ({"weights": params} | kinds).items()}
    parts["logits and sampling"] = cells * (_SAMPLER_BYTES + 4 * _SAMPLING_COPIES)
    if config.vision is not None:
        parts["images"] = SCORE_BYTES
    if placed.devices.flat[0].platform == "cpu":
        parts["scratch of a step, at most"] = TEMPORARY_BYTES
    else:
        storage = {"engram": engram, "expert_storage": expert_storage, "dispatch": dispatch}
        step = abstract_step(
            *(config, numerics, placed),
            phase="prefill_exact",
            batch=size.shards,
            context=size.max_len,
            block=block or step_sizes(numerics)[0],
            **storage,
        )
        parts["scratch of the largest step"] = _scratch(step)
    return MemoryPlan(parts, _limit(mesh) if limit is None else limit)


def _scratch(step: AbstractStep) -> int:
    """Bytes that a step takes on a device beside its arguments: temporaries, outputs that are none of them, program."""
    with tqdm(desc="compiling the largest step, to know its memory", bar_format="{desc} {elapsed}", total=1) as bar:
        try:
            found = step.lower().compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"the largest step does not compile for these devices: {error}") from error
        bar.update()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.temp_size_in_bytes + found.generated_code_size_in_bytes + outputs


def check_memory(plan: MemoryPlan) -> None:
    """ValueError with the sum where it does not fit."""
    if plan.limit is not None and plan.total > plan.limit:
        raise ValueError(
            f"this server does not fit its devices:\n{plan}\nGive it fewer rows or pages, a shorter max_len, "
            "Engram tables on the host, or more devices (launch/plan.py says how many)"
        )


def _limit(mesh: Mesh | None) -> int | None:
    local = jax.local_devices()
    stats = local[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if local[0].platform != "cpu" or not Path("/proc/meminfo").exists():
        return None
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    # Made-up devices of one process share the machine's memory.
    return int(lines["MemAvailable"].split()[0]) * 1024 // (1 if mesh is None else len(local))
