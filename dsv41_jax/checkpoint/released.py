"""Reader and writer of the released format; this module reads parameters, its neighbours do the rest.

`released_folder` checks a folder, `names` maps tensor names to the pytree, `storage` converts, `destination` places,
`save_released` writes. Tensors are read by byte range, in file order, and handed to their leaves in blocks of rows: no
file and no large tensor is ever whole in host memory. `load_params` reads Orbax folders too, through `TensorSource`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.checkpoint.destination import Destination, Padded, Placement
from dsv41_jax.checkpoint.names import LeafPath, NameMap, name_map, nest
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from dsv41_jax.checkpoint.safetensors_file import CheckpointError
from dsv41_jax.checkpoint.save_released import save_released
from dsv41_jax.checkpoint.storage import Storage, check_scales, param_leaves, row_blocks, to_params
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import Numerics

__all__ = ["CheckpointError", "ReleasedFolder", "abstract_params", "check_choices", "load_params", "save_released"]

ENGRAM_PLACES = ("device", "host", "mmap")

Progress = Callable[[int, int], None]


def _check_choice(engram: str) -> None:
    if engram not in ENGRAM_PLACES:
        raise ValueError(f"engram={engram!r} is unknown; choose one of {', '.join(ENGRAM_PLACES)}")


def check_choices(engram: str, expert_storage: str) -> None:
    """Raise ValueError, naming the choices that exist, for an unknown place of the tables or form of the experts."""
    _check_choice(engram)
    Storage(experts=expert_storage)


def _wanted_leaves(names: NameMap, storage: Storage, engram: str) -> dict:
    leaves = param_leaves(names, storage)
    return {path: form for path, form in leaves.items() if engram == "device" or not is_table(path)}


def is_table(path: LeafPath) -> bool:
    """Whether a leaf is the weight or the scale of an Engram table."""
    return path[0] == "engram" and path[2] == "embed"


def abstract_params(
    config: ModelConfig, numerics: Numerics, *, engram: str = "device", expert_storage: str = "fp4"
) -> dict:
    """The pytree `load_params` gives, as jax.ShapeDtypeStruct leaves, from the configuration alone."""
    _check_choice(engram)
    leaves = _wanted_leaves(name_map(config), Storage(numerics.dtype == jnp.float32, expert_storage), engram)
    return nest({path: jax.ShapeDtypeStruct(*form) for path, form in leaves.items()})


def load_params(
    folder: TensorSource,
    numerics: Numerics,
    *,
    placement: Placement | None = None,
    padded: Padded | None = None,
    engram: str = "device",
    expert_storage: str = "fp4",
    only: Callable[[LeafPath], bool] | None = None,
    progress: Progress | None = None,
) -> dict:
    """Load the parameters of a checked folder.

    Args:
        folder: from `ReleasedFolder.open` or `OrbaxFolder.open`.
        numerics: those that compute in float32 dequantise every weight on the way in; the others keep released forms.
        placement: sharding of a leaf by its dotted path (`layers.attn.wq_a.weight`); None means the default device.
            Each process reads only what its own devices hold.
        padded: shape of a leaf where its dimensions are padded with zeros, by path and own shape.
        engram: "device" puts the Engram tables into the result; "host" and "mmap" leave them out, see
            `ReleasedFolder.engram_table`.
        expert_storage: "fp4" keeps routed experts packed, "fp8" holds the same values in E4M3 under the same scales,
            "bf16" dequantises them.
        only: which leaves to load, by path; a weight and its scale together. None means all.
        progress: called with (bytes done, bytes in all) after each tensor.

    Returns:
        nested dicts of jax.Array; leaves of repeated layers are stacked.

    Raises:
        CheckpointError: a file changed since it was opened, or a scale that "fp8"/"bf16" experts cannot represent.
    """
    _check_choice(engram)
    names = name_map(folder.config)
    storage = Storage(numerics.dtype == jnp.float32, expert_storage)
    leaves = _wanted_leaves(names, storage, engram)
    if only is not None:
        leaves = {path: form for path, form in leaves.items() if only(path)}
    destination = Destination(leaves, placement, padded)
    loaded = [name for name, place in names.places.items() if place.path in leaves]
    # A scale whose leaf is gone is consumed together with its weight.
    consumed = {*loaded, *filter(None, map(names.scale_of, loaded))}
    total, done = sum(names.specs[name].nbytes for name in consumed), 0
    for name in folder.reading_order(loaded):
        done += _load_tensor(folder, names, name, leaves, destination)
        if progress:
            progress(done, total)
    if done != total:
        raise ValueError(f"{folder.path}: {done} of {total} bytes were consumed")
    return nest(destination.finish())


def _load_tensor(folder: TensorSource, names: NameMap, name: str, leaves: dict, destination: Destination) -> int:
    """Place one tensor in blocks, dequantised if its scale has no leaf. Returns the released bytes consumed."""
    spec, place = names.specs[name], names.places[name]
    dtype = leaves[place.path][1]
    scale = names.scale_of(name)
    merged = scale if scale and names.places[scale].path not in leaves else None
    checked = scale if scale and spec.kind == "fp4" and dtype != np.uint8 else None
    for block_start, block_stop in row_blocks(spec.shape):
        start, stop = destination.wanted(place.path, place.index, (block_start, block_stop))
        destination.skip(place.path, place.index, (block_start, start))
        destination.skip(place.path, place.index, (stop, block_stop))
        if start == stop:
            continue
        scales = None
        if merged or checked:
            per = spec.shape[0] // names.specs[scale].shape[0]  # weight rows that share a row of scales: 32 or 1
            scales = folder.rows(scale, start // per, stop // per)
        if checked:
            check_scales(scales, scale, folder.where(scale), f"experts in {jnp.dtype(dtype).name}")
        block = to_params(folder.rows(name, start, stop), scales, dtype)
        destination.put(place.path, place.index, start, block)
    return spec.nbytes + (names.specs[merged].nbytes if merged else 0)
