"""Parameters by module, from the configuration alone: how many there are, in how many bytes, and how many a token
meets.

Everything is read off the list of released tensors (`checkpoint.manifest`), so no size is typed twice.
"""

import dataclasses
import functools
import math

from dsv41_jax.checkpoint.manifest import TensorSpec
from dsv41_jax.checkpoint.names import LeafPath, flatten, name_map
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import RELEASED
from pallas_kernels.flops import BF16, F32, FP8

MODULES = (
    "embedding",
    "attention",
    "compressors",
    "indexers",
    "hyper-connections",
    "norms",
    "router",
    "routed experts",
    "shared experts",
    "Engram projections",
    "head",
    "Engram tables",
    "draft blocks",
    "vision",
)
BACKBONE = MODULES[:11]  # what "552B parameters" means; the others are extra
DRAFT_WINDOWS = "draft windows"  # maps of the draft blocks that every token goes through, see `dspark.seed_windows`

_OF_ROOT = {"embed": "embedding", "norm": "norms", "compressors": "compressors", "indexers": "indexers", "head": "head"}
_OF_LAYER = {"attn": "attention", "hc_attn": "hyper-connections", "hc_ffn": "hyper-connections"}
_OF_FFN = {"gate": "router", "experts": "routed experts", "shared_experts": "shared experts"}


def module_of(path: LeafPath) -> str:
    """The module (one of MODULES) that a leaf of the parameter pytree belongs to; norms inside one belong to it."""
    root = path[0]
    if root == "engram":
        return "Engram tables" if path[2] == "embed" else "Engram projections"
    if root == "mtp":
        return "draft blocks"
    if root != "layers":
        return _OF_ROOT.get(root, "vision")
    return _OF_FFN[path[2]] if path[1] == "ffn" else _OF_LAYER.get(path[1], "norms")


@dataclasses.dataclass(frozen=True)
class ModuleSize:
    """Numbers of a module (scales are none), and bytes in the stored form (with scales)."""

    parameters: int = 0
    nbytes: int = 0


def module_sizes(config: ModelConfig, expert_storage: str = "fp4") -> dict[str, ModuleSize]:
    """Size of each of MODULES, as `load` keeps them on a device.

    Args:
        expert_storage: see `checkpoint.released.load_params`. "fp4" is as released.
    """
    parameters, nbytes = dict.fromkeys(MODULES, 0), dict.fromkeys(MODULES, 0)
    names = name_map(config)
    for name, place in names.places.items():
        parameters[module_of(place.path)] += names.specs[name].parameters
    for path, leaf in flatten(abstract_params(config, RELEASED, expert_storage=expert_storage)):
        nbytes[module_of(path)] += math.prod(leaf.shape) * leaf.dtype.itemsize
    return {module: ModuleSize(parameters[module], nbytes[module]) for module in MODULES}


@dataclasses.dataclass(frozen=True)
class Map:
    """A matrix that one token's numbers are multiplied by.

    Attributes:
        module: one of MODULES, or DRAFT_WINDOWS. layer: of the backbone; None for the head and DRAFT_WINDOWS.
        parameters: its size. uses: multiplications by it for each token: below 1 where several tokens make one latent.
        precision: of the multiplication, as the release has it. stored: FP8 for all maps that are stored in FP8 or
            FP4; differs from `precision` for wo_a, which is multiplied in bf16.
        source: whether it makes entries of a KV source.
    """

    module: str
    layer: int | None
    parameters: int
    uses: float
    precision: str
    stored: str
    source: bool


@functools.lru_cache(maxsize=8)
def token_maps(config: ModelConfig) -> tuple[Map, ...]:
    """The maps of a token: all matrices of the backbone but tables that are looked up, and of the chosen experts only.

    Elementwise gains, norms and biases are no maps. Any num_experts_per_tok experts stand for the chosen ones.
    """
    names, maps = name_map(config), []
    for name, place in names.places.items():
        spec, parts = names.specs[name], name.split(".")
        module = _map_module(config, spec, place.path, place.index)
        if module is None:
            continue
        layer = int(parts[1]) if parts[0] == "layers" else None
        source = module == "compressors"
        ratio = config.compress_ratios[layer] if source else 1
        precision, stored = _precisions(spec, ratio)
        uses = 1 / ratio if parts[-2] == "wk" else 1
        maps.append(Map(module, layer, spec.parameters, uses, precision, stored, source))
    return tuple(maps)


def _map_module(config: ModelConfig, spec: TensorSpec, path: LeafPath, index: tuple[int, ...]) -> str | None:
    if len(spec.shape) != 2 or not spec.parameters:
        return None
    module = module_of(path)
    if module == "draft blocks":
        seeds = path[1] == "main_proj" or path[1:4] == ("layers", "attn", "wkv")
        return DRAFT_WINDOWS if seeds else None
    looked_up = module in ("embedding", "Engram tables", "vision")
    gain = path[-1] in ("q_weight", "k_weight")
    foreign = module == "routed experts" and index[1] >= config.num_experts_per_tok
    return None if looked_up or gain or foreign else module


def _precisions(spec: TensorSpec, ratio: int) -> tuple[str, str]:
    """Precision of the multiplication, and of the storage as it is counted."""
    if spec.kind in ("fp8", "fp4"):  # the input is quantised to FP8, but for wo_a
        return (BF16 if spec.name.endswith(".wo_a.weight") else FP8), FP8
    pooled = ".compressor." in spec.name and ratio > 1
    in_float32 = spec.kind == "f32" or pooled or spec.name.endswith(("head.weight", ".gate.weight"))
    return (F32, F32) if in_float32 else (BF16, BF16)


@dataclasses.dataclass(frozen=True)
class Active:
    """Parameters that a token meets: in the encoder's layers (CED prefill), and in all layers with the head."""

    prefill: int = 0
    decode: int = 0


def active_parameters(config: ModelConfig) -> dict[str, Active]:
    """`Active` of each module that has maps, DRAFT_WINDOWS apart.

    The hand-over of encoder-only prefill, which runs the decoder's compressor, is not among `prefill`: see
    `hand_over_parameters`.
    """
    result: dict[str, Active] = {}
    for each in token_maps(config):
        if each.module == DRAFT_WINDOWS:
            continue
        old = result.get(each.module, Active())
        encoder = each.layer is not None and each.layer < config.decoder_start
        result[each.module] = Active(old.prefill + encoder * each.parameters, old.decode + each.parameters)
    return {module: result[module] for module in MODULES if module in result}


def hand_over_parameters(config: ModelConfig) -> int:
    """Parameters of the decoder's KV source that a token of encoder-only prefill meets too."""
    return sum(m.parameters for m in token_maps(config) if m.source and m.layer == config.decoder_start)
