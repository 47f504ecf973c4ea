"""The layer-share map: which layer reads what from whom, made once from the configuration and static under jit.

Each layer reads caches and selections by key (`cache.main_kv[share.main_kv_from]`), never from a slot that an earlier
layer last wrote. `python -m dsv41_jax.layer_map --config=configs/flash.py` prints it.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dsv41_jax.config import ModelConfig, load_config

Side = Literal["encoder", "decoder", "draft"]
Pool = Literal["builds", "searches"]

LEGEND = (
    "mode: WINDOW = own sliding window only; FULL = makes main KV and index keys and selects; REINDEX = selects anew; "
    "REUSE = takes a selection as it is. @L = from layer L, * = its own, - = none. pool: of candidate blocks."
)


class Mode(enum.Enum):
    """How a layer finds the compressed entries it attends to."""

    WINDOW = "window"  # ratio 0: none, the sliding window only
    FULL = "full"  # KV source: makes main KV and index keys, and selects from them
    REINDEX = "reindex"  # index source only: selects anew from an earlier layer's index keys
    REUSE = "reuse"  # takes an earlier layer's selection and main KV


@dataclass(frozen=True)
class LayerShare:
    """One layer's place in the map. `*_from` are backbone layer ids; None where the layer has no compressed entries.

    layer: backbone layer id, or num_hidden_layers + M for draft block M. index_key_from: whose index keys the layer's
    own scoring reads, None for REUSE, which does not score. index_from: whose selection it attends to. pool: "builds"
    the candidate pool, or "searches" only inside it. tapped: its input feeds the draft blocks.
    """

    layer: int
    side: Side
    mode: Mode
    ratio: int
    main_kv_from: int | None
    index_key_from: int | None
    index_from: int | None
    pool: Pool | None
    engram: bool
    tapped: bool


@lru_cache(maxsize=256)
def layer_map(config: ModelConfig) -> tuple[LayerShare, ...]:
    """The map of a legal configuration: num_hidden_layers backbone layers, then the draft blocks."""
    backbone = [_backbone_share(config, layer) for layer in range(config.num_hidden_layers)]
    drafts = [_draft_share(config.num_hidden_layers + block) for block in range(config.n_draft)]
    return tuple(backbone + drafts)


def _backbone_share(config: ModelConfig, layer: int) -> LayerShare:
    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    ratio = config.backbone_ratios[layer]
    if ratio == 0:
        mode = Mode.WINDOW
    elif layer in kv:
        mode = Mode.FULL
    elif layer in index:
        mode = Mode.REINDEX
    else:
        mode = Mode.REUSE
    # Sources ascend, so the nearest one at or before the layer is the largest that is not past it.
    main_kv_from = max(s for s in kv if s <= layer) if ratio else None
    index_from = max(s for s in index if s <= layer) if ratio else None
    selects = mode in (Mode.FULL, Mode.REINDEX)
    candidates = config.candidate_source_layer_id
    pool: Pool | None = None
    if selects and candidates is not None and layer >= candidates:
        pool = "builds" if layer == candidates else "searches"
    return LayerShare(
        layer=layer,
        side="decoder" if layer >= config.decoder_start else "encoder",
        mode=mode,
        ratio=ratio,
        main_kv_from=main_kv_from,
        index_key_from=main_kv_from if selects else None,
        index_from=index_from,
        pool=pool,
        engram=layer in config.engram_layer_ids,
        tapped=layer in config.taps,
    )


def _draft_share(layer: int) -> LayerShare:
    return LayerShare(
        layer=layer,
        side="draft",
        mode=Mode.WINDOW,
        ratio=0,
        main_kv_from=None,
        index_key_from=None,
        index_from=None,
        pool=None,
        engram=False,
        tapped=False,
    )


def format_layer_map(config: ModelConfig) -> str:
    """The map as an aligned table with a one-line legend, one layer a line."""
    head = "layer side mode ratio main_kv_from index_keys_from selection_from pool engram tapped reads"
    rows = [head.split()]
    for share in layer_map(config):
        rows.append(_row(share, config))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, LEGEND])


def _row(share: LayerShare, config: ModelConfig) -> list[str]:
    def origin(source: int | None) -> str:
        return "-" if source is None else f"@{source}" + ("*" if source == share.layer else "")

    if share.side == "draft":
        block = share.layer - config.num_hidden_layers
        name = f"{share.layer} (mtp.{block})"
        reads = f"own window, made from tapped layers {','.join(map(str, config.taps))}"
    else:
        name = str(share.layer)
        reads = "own window" if share.mode is Mode.WINDOW else "own window, selected main KV"
    return [
        name,
        share.side,
        share.mode.name,
        str(share.ratio),
        origin(share.main_kv_from),
        origin(share.index_key_from),
        origin(share.index_from),
        share.pool or "-",
        "yes" if share.engram else "-",
        "yes" if share.tapped else "-",
        reads,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the map of `--config`."""
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.layer_map", description="Print the layer-share map.")
    parser.add_argument("--config", required=True, help="configs/*.py, a config.json, or a folder that holds one")
    print(format_layer_map(load_config(parser.parse_args(arguments).config)))


if __name__ == "__main__":
    main()
