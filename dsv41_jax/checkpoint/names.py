"""Released tensor names <-> places in the parameter pytree, in both directions.

`NameMap` is made from the manifest of a configuration. Every released tensor has exactly one place, a path into nested
dicts and indices into the leaf's leading (stacked) axes, and every slot of every stacked leaf has exactly one tensor:

    layers.3.ffn.experts.5.w1.weight      layers.ffn.experts.w1.weight  [3, 5]
    layers.14.attn.compressor.wkv.weight  compressors.r2.wkv.weight     [position of 14 among the KV sources of ratio 2]
    layers.14.attn.indexer.wk.weight      compressors.r2.wk.weight      likewise: index keys belong to the KV source
    layers.24.attn.indexer.wq_b.scale     indexers.wq_b.scale           [position of 24 among the index sources]
    layers.1.engram.wkv.weight            engram.l1.wkv.weight          []
    mtp.1.attn.wkv.weight                 mtp.layers.attn.wkv.weight    [1]
    mtp.2.norm.weight                     mtp.norm.weight               []
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv41_jax.checkpoint.manifest import Kind, TensorSpec, manifest
from dsv41_jax.config import ModelConfig

LeafPath = tuple[str, ...]

# Once in the draft stack, not once per block; the released name carries the block that uses it.
_DRAFT_SINGLES = {"main_proj", "main_norm", "norm", "markov_head", "confidence_head"}
SCALED = ("fp8", "fp4", "table")  # kinds of weights that have a scale beside them
_OLDER_SPELLINGS = {"weight_scale_inv": "scale", "e_score_correction_bias": "bias"}
_IGNORED = re.compile(r"mtp\.\d+\.(embed|head)\.weight")


def canonical(name: str) -> str | None:
    """The released spelling of a tensor name found in a file, or None for a tensor that is to be ignored.

    Strips a `model.` prefix and maps older spellings: self_attn, mlp (not under `vision.`), weight_scale_inv (these are
    scales already, no reciprocal is taken), e_score_correction_bias. Draft copies of `embed` and `head` are ignored.
    """
    parts = name.removeprefix("model.").split(".")
    if parts[0] != "vision":
        parts = [{"self_attn": "attn", "mlp": "ffn"}.get(part, part) for part in parts]
    parts[-1] = _OLDER_SPELLINGS.get(parts[-1], parts[-1])
    result = ".".join(parts)
    return None if _IGNORED.fullmatch(result) else result


@dataclass(frozen=True)
class Place:
    """Where one released tensor lives: leaf path, and index into the leaf's stacked axes (() if it is not stacked)."""

    path: LeafPath
    index: tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One leaf of the pytree in the released form.

    Attributes:
        path: keys from the root.
        stack: sizes of the leading stacked axes.
        shape: shape of each released tensor in it.
        kind: its storage kind.
    """

    path: LeafPath
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    kind: Kind


def _layer_place(rest: list[str], layer: int, root: LeafPath) -> Place:
    if rest[0].startswith("hc_"):
        side, part = rest[0].rsplit("_", 1)
        return Place((*root, side, part), (layer,))
    if rest[:2] == ["ffn", "experts"]:
        return Place((*root, "ffn", "experts", *rest[3:]), (layer, int(rest[2])))
    return Place((*root, *rest), (layer,))


def _place(config: ModelConfig, name: str) -> Place:
    root, *rest = name.split(".")
    if root == "layers":
        layer, rest = int(rest[0]), rest[1:]
        if rest[0] == "engram":
            return Place(("engram", f"l{layer}", *rest[1:]), ())
        if rest[:2] == ["attn", "compressor"] or rest[:2] == ["attn", "indexer"] and rest[2] in ("wk", "k_norm"):
            ratio = config.backbone_ratios[layer]
            sources = [s for s in config.kv_source_layer_ids if config.backbone_ratios[s] == ratio]
            return Place(("compressors", f"r{ratio}", *rest[2:]), (sources.index(layer),))
        if rest[:2] == ["attn", "indexer"]:
            return Place(("indexers", *rest[2:]), (config.index_source_layer_ids.index(layer),))
        return _layer_place(rest, layer, ("layers",))
    if root == "mtp":
        block, rest = int(rest[0]), rest[1:]
        return Place(("mtp", *rest), ()) if rest[0] in _DRAFT_SINGLES else _layer_place(rest, block, ("mtp", "layers"))
    if root == "vision" and rest[0] == "blocks":
        return Place(("vision", "blocks", *rest[2:]), (int(rest[1]),))
    return Place((root, *rest), ())


class NameMap:
    """Both directions of the mapping, and the leaves it makes up.

    Attributes:
        specs: the manifest, {released name: TensorSpec}.
        places: {released name: Place}, in manifest order.
        names: {Place: released name}.
        leaves: {path: Leaf}, in order of first appearance.
    """

    def __init__(self, config: ModelConfig):
        self.specs: dict[str, TensorSpec] = manifest(config)
        self.places: dict[str, Place] = {name: _place(config, name) for name in self.specs}
        self.names: dict[Place, str] = {place: name for name, place in self.places.items()}
        self.leaves: dict[LeafPath, Leaf] = {}
        for name, place in self.places.items():
            spec, known = self.specs[name], self.leaves.get(place.path)
            if known is not None and (known.shape, known.kind) != (spec.shape, spec.kind):
                raise ValueError(f"{name} has another shape or kind than its neighbours in {'.'.join(place.path)}")
            stack = tuple(i + 1 for i in place.index)
            if known is not None:
                stack = tuple(map(max, stack, known.stack))
            if known is None or stack != known.stack:
                self.leaves[place.path] = Leaf(place.path, stack, spec.shape, spec.kind)
        # Distinct places that number as many as the slots: every slot has exactly one tensor.
        slots = sum(math.prod(leaf.stack) for leaf in self.leaves.values())
        if not len(self.places) == len(self.names) == slots:
            raise ValueError(
                f"{len(self.places)} tensors, {len(self.names)} places and {slots} slots do not match one to one"
            )

    def scale_of(self, name: str) -> str | None:
        """The name of the scale that belongs to a quantised weight, or None."""
        return name.removesuffix("weight") + "scale" if self.specs[name].kind in SCALED else None


@functools.lru_cache(maxsize=8)
def name_map(config: ModelConfig) -> NameMap:
    """The `NameMap` of a configuration, made once."""
    return NameMap(config)


def nest(leaves: dict[LeafPath, object]) -> dict:
    """Nested dicts from {path: value}."""
    tree: dict = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def flatten(tree: dict, path: LeafPath = ()) -> Iterator[tuple[LeafPath, object]]:
    """(path, leaf) of nested dicts; the inverse of `nest`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def by_released_name(
    tree: dict, config: ModelConfig, take: Callable = lambda leaf, index: leaf[index]
) -> dict[str, object]:
    """{released name: its slice} of a tree of params or gradients; leaves the tree lacks (dropped scales) are left out.

    Args:
        tree: nested dicts shaped as the parameter pytree.
        config: the configuration.
        take: how to take one tensor out of a stacked leaf.
    """
    leaves = dict(flatten(tree))
    places = name_map(config).places
    return {name: take(leaves[place.path], place.index) for name, place in places.items() if place.path in leaves}
