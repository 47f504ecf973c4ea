"""How the layer loop is rolled up: consecutive layers of one kind share one traced body.

The plan is derived from the layer-share map. A segment is a group of layers that starts at an index source (or the
window-only layers before the first one), repeated `repeats` times; a run is a stretch of equal layers inside it. The
released model has 40 layers and 12 traced bodies.
"""

import dataclasses
import functools

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_map import LayerShare, Mode, layer_map


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` equal consecutive layers, the first at `offset` inside its group."""

    mode: Mode
    ratio: int
    pool: str | None
    decoder: bool
    engram: bool
    tapped: bool
    offset: int
    count: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """A group of layers, repeated.

    Attributes:
        first: first layer. size: layers of one group. repeats: groups.
        runs: the group's layers.
        kv_slot, index_slot: where the group's sources stand among the KV sources of `ratio` and among all index
            sources.
        kv_step, index_step: how far the slots move from one group to the next.
    """

    first: int
    size: int
    repeats: int
    runs: tuple[Run, ...]
    kv_slot: int
    index_slot: int
    kv_step: int = 0
    index_step: int = 0


def sources_of_ratio(config: ModelConfig, ratio: int) -> tuple[int, ...]:
    """KV source layers of one ratio, ascending: the order of the stacked caches and compressors of that ratio."""
    return tuple(s for s in config.kv_source_layer_ids if config.compress_ratios[s] == ratio)


def source_ratios(config: ModelConfig) -> tuple[int, ...]:
    """Distinct ratios of the KV sources, ascending."""
    return tuple(sorted({config.compress_ratios[s] for s in config.kv_source_layer_ids}))


def _runs(shares: list[LayerShare]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for offset, share in enumerate(shares):
        kind = (share.mode, share.ratio, share.pool, share.side == "decoder", share.engram, share.tapped)
        plain = not share.engram and share.mode in (Mode.WINDOW, Mode.REUSE)
        last = runs[-1] if runs else None
        if plain and last and kind == (last.mode, last.ratio, last.pool, last.decoder, last.engram, last.tapped):
            runs[-1] = dataclasses.replace(last, count=last.count + 1)
        else:
            runs.append(Run(*kind, offset=offset, count=1))
    return tuple(runs)


@functools.lru_cache(maxsize=256)
def layer_plan(config: ModelConfig) -> tuple[Segment, ...]:
    """The backbone's segments, in order; every layer occurs in exactly one, and none crosses into the decoder."""
    shares = layer_map(config)[: config.num_hidden_layers]
    starts = sorted({0, *config.index_source_layer_ids})
    segments: list[Segment] = []
    for start, stop in zip(starts, [*starts[1:], config.num_hidden_layers], strict=True):
        group = list(shares[start:stop])
        head = group[0]
        kv_slot = index_slot = 0
        if head.ratio:
            kv_slot = sources_of_ratio(config, head.ratio).index(head.main_kv_from)
            index_slot = config.index_source_layer_ids.index(start)
        segment = Segment(start, stop - start, 1, _runs(group), kv_slot, index_slot)
        if segments and start != config.decoder_start and _continues(segments[-1], segment):
            last = segments[-1]
            steps = dict(kv_step=kv_slot - last.kv_slot, index_step=1) if last.repeats == 1 else {}
            segments[-1] = dataclasses.replace(last, repeats=last.repeats + 1, **steps)
        else:
            segments.append(segment)
    return tuple(segments)


def _continues(last: Segment, new: Segment) -> bool:
    """Whether `new` is one more repeat of `last`: same layers, slots one step on, nothing that is made once."""
    if last.runs != new.runs or any(run.engram or run.tapped or run.pool == "builds" for run in new.runs):
        return False
    if new.runs[0].mode not in (Mode.FULL, Mode.REINDEX):
        return False
    expected_step = 1 if new.runs[0].mode is Mode.FULL else 0
    return (
        new.kv_slot == last.kv_slot + last.repeats * expected_step
        and new.index_slot == last.index_slot + last.repeats
        and new.first == last.first + last.repeats * last.size
    )
