"""Where every array of a model lives on a mesh: the one table of rules, and what is made or restored by it.

Every dimension of an array has a logical name (`PARAMETERS`, `CACHE`), and `RULES` says over which mesh axes a name is
split. docs/pods.md shows the result. A dimension that its axes do not divide is either left whole (dense columns, by
`Parallel.splits`, as the step computes them), padded (experts, Engram rows), or an error.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.cache import CacheArrays, abstract_arrays, page_tables, pages_for, zero_arrays
from dsv41_jax.checkpoint.names import flatten, name_map, nest
from dsv41_jax.checkpoint.released import abstract_params, load_params
from dsv41_jax.checkpoint.tensor_source import TensorSource
from dsv41_jax.config import ModelConfig
from dsv41_jax.expert_parallel import expert_share
from dsv41_jax.kernel_params import abstract_packed
from dsv41_jax.layer_plan import source_ratios
from dsv41_jax.mesh_layout import Layout, ShardingError, check_layout, layout_of
from dsv41_jax.numerics import Numerics
from dsv41_jax.pages import PageLayout
from dsv41_jax.parallel import AXES, CONTEXT, ROW_AXES, TENSOR, WEIGHT_BLOCK, Parallel

Spec = PartitionSpec

# Logical name of a dimension -> the mesh axes it is split over. Names not here are never split.
RULES: dict[str, tuple[str, ...]] = {
    "row": ROW_AXES,  # a sequence
    "page": ROW_AXES,  # of the pools; a row's pages are on the row's device
    "token": (CONTEXT,),  # of a block, where the step splits it
    "head": (TENSOR,),  # rows of a matrix that belong to attention heads, in head groups
    "column": (TENSOR,),  # outputs of a dense matrix
    "column_block": (TENSOR,),  # the same, in whole blocks of 32 that share FP8 scales
    "expert": AXES,
    "memory": AXES,  # rows of an Engram table
}

# First match wins; a leaf that matches nothing is whole on every device. Stacked leaves begin with their layers.
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("embed.weight", (None, "column")),
    ("head.weight", ("column", None)),
    ("*.attn.wq_b.*", (None, "head", None)),
    ("*.attn.wo_a.*", (None, "head", None)),
    ("*.attn.wo_b.*", (None, "column_block", None)),
    ("*.ffn.experts.*", (None, "expert", None, None)),
    ("*.ffn.shared_experts.*", (None, "column_block", None)),
    ("engram.*.embed.*", ("memory", None)),
    ("engram.*.wkv.*", ("column_block", None)),
    ("mtp.main_proj.*", ("column_block", None)),
    ("mtp.markov_head.head.weight", ("column", None)),
    ("vision.blocks.attn.*.weight", (None, "column", None)),
    ("vision.blocks.mlp.*.weight", (None, "column", None)),
    ("aligner.*.weight", ("column", None)),
)

CACHE: dict[str, tuple[str | None, ...]] = {
    "window": (None, "row"),
    "draft_window": (None, "row"),
    "main_kv": (None, "page"),
    "index_key": (None, "page"),
    "tail_values": (None, "row"),
    "tail_gates": (None, "row"),
    "page_table": ("row",),
    "encoder_floor": ("row",),
    "decoder_floor": ("row",),
}


# Specs


def spec_of(name: str, axes: Sequence[str | None], shape: Sequence[int], layout: Layout) -> Spec:
    """The PartitionSpec of an array whose dimensions have these logical names (the rest none).

    Raises:
        ShardingError: a mesh axis is used twice, or a split dimension is not a multiple of its devices.
    """
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    used: set[str] = set()
    entries: list[tuple[str, ...] | None] = []
    for dim, logical in enumerate(axes):
        split = RULES[logical] if logical else ()
        count = math.prod(sizes[axis] for axis in split)
        if count == 1:
            entries.append(None)
            continue
        if used & set(split):
            raise ShardingError(
                f"{name}: two dimensions of {tuple(axes)} are split over the mesh axis {used & set(split)}"
            )
        if shape[dim] % count:
            raise ShardingError(
                f"{name}: dimension {dim} ({logical}, {shape[dim]}) is not a multiple of the {count} devices of mesh "
                f"{layout} that it is split over"
            )
        used |= set(split)
        entries.append(split)
    while entries and entries[-1] is None:
        entries.pop()
    return Spec(*entries)


def param_axes(path: Sequence[str], shape: Sequence[int], layout: Layout) -> tuple[str | None, ...]:
    """Logical names of a parameter's dimensions; columns that are not split have none."""
    name = ".".join(path)
    axes = next((axes for pattern, axes in PARAMETERS if fnmatch.fnmatchcase(name, pattern)), ())
    parallel = Parallel(*layout.sizes)

    def kept(dim: int, logical: str | None) -> str | None:
        if logical == "column":
            return logical if parallel.splits(shape[dim], 1) else None
        if logical == "column_block":
            columns = shape[dim] * (WEIGHT_BLOCK if path[-1] == "scale" else 1)
            return logical if parallel.splits(columns) else None
        return logical

    return tuple(kept(dim, logical) for dim, logical in enumerate(axes))


def param_specs(params: dict, layout: Layout) -> dict:
    """PartitionSpecs of a parameter pytree (arrays or ShapeDtypeStructs of whole shapes)."""
    leaves = flatten(params)
    return nest(
        {path: spec_of(".".join(path), param_axes(path, x.shape, layout), x.shape, layout) for path, x in leaves}
    )


def cache_specs(arrays: CacheArrays, layout: Layout) -> CacheArrays:
    """PartitionSpecs of a cache."""

    def specs(field: str) -> Any:
        return jax.tree.map(lambda x: spec_of(f"cache.{field}", CACHE[field], x.shape, layout), getattr(arrays, field))

    return CacheArrays(**{field.name: specs(field.name) for field in dataclasses.fields(CacheArrays)})


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The NamedShardings of a pytree of PartitionSpecs: the one place that makes them."""
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, Spec))


def optimizer_specs(optimizer: optax.GradientTransformation, params: dict, layout: Layout) -> Any:
    """PartitionSpecs of an optimizer's state: what it keeps of a parameter lies where the parameter does."""
    specs = dict(flatten(param_specs(params, layout)))
    shapes = {path: x.shape for path, x in flatten(params)}

    def spec(path: tuple, leaf: jax.ShapeDtypeStruct) -> Spec:
        keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        ends = (keys[i:] for i in range(len(keys)))  # an optimizer of several parts names the part first
        return next((specs[end] for end in ends if shapes.get(end) == leaf.shape), Spec())

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(optimizer.init, params))


# Parameters


def padded_shape(path: Sequence[str], shape: Sequence[int], layout: Layout, kernels: bool) -> tuple[int, ...]:
    """The shape a parameter has on a mesh: with zeros at the end of some dimensions.

    Experts and Engram rows are padded to a multiple of the devices; the hidden columns of shared experts that kernels
    read as `Parallel.padded` says.
    """
    axes = next((axes for pattern, axes in PARAMETERS if fnmatch.fnmatchcase(".".join(path), pattern)), ())
    padded = list(shape)
    for dim, logical in enumerate(axes):
        if logical in ("expert", "memory"):
            padded[dim] = expert_share(shape[dim], layout.devices) * layout.devices
    if "shared_experts" in path:
        dim, block = (2 if path[-2] == "w2" else 1), (WEIGHT_BLOCK if path[-1] == "scale" else 1)
        padded[dim] = Parallel(*layout.sizes).padded(shape[dim] * block, kernels) // block
    return tuple(padded)


def abstract(
    config: ModelConfig, numerics: Numerics, mesh: Mesh, *, engram: str = "device", expert_storage: str = "fp4"
) -> dict:
    """The parameters `load` gives on a mesh, as ShapeDtypeStructs with shardings."""
    layout = layout_of(mesh)
    check_layout(config, layout)
    plain = dict(flatten(abstract_params(config, numerics, engram=engram, expert_storage=expert_storage)))
    padded = {path: padded_shape(path, x.shape, layout, numerics.kernels) for path, x in plain.items()}
    params = nest({path: jax.ShapeDtypeStruct(padded[path], x.dtype) for path, x in plain.items()})
    if numerics.kernels:
        params = abstract_packed(params)
    return placed(mesh, params, param_specs(params, layout))


def placed(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """ShapeDtypeStructs with the shardings of `specs`."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings(mesh, specs)
    )


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's part of arrays, or ShapeDtypeStructs, with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def init(make: Callable[[jax.Array], dict], key: jax.Array, mesh: Mesh) -> dict:
    """`make(key)`, a parameter pytree, made in its shards: no device ever holds a whole split array. Experts and Engram
    rows are padded with zeros, as `padded_shape` says.
    """
    layout = layout_of(mesh)

    def padded(key: jax.Array) -> dict:
        leaves = {}
        for path, leaf in flatten(make(key)):
            shape = padded_shape(path, leaf.shape, layout, False)
            leaves[path] = jax.numpy.pad(leaf, [(0, n - m) for n, m in zip(shape, leaf.shape, strict=True)])
        return nest(leaves)

    specs = param_specs(jax.eval_shape(padded, key), layout)
    return jax.jit(padded, out_shardings=shardings(mesh, specs))(key)


def restore(source: TensorSource, numerics: Numerics, mesh: Mesh, **options: Any) -> dict:
    """`load_params` of a checked folder straight into shards: each process reads what its devices hold, and nothing
    else. `options` are those of `load_params`.
    """
    return load_params(source, numerics, **placement(source.config, numerics, mesh), **options)


def placement(config: ModelConfig, numerics: Numerics, mesh: Mesh) -> dict[str, Callable]:
    """The arguments `placement` and `padded` of `load_params` for a mesh."""
    layout = layout_of(mesh)
    check_layout(config, layout)
    whole = {path: (*leaf.stack, *leaf.shape) for path, leaf in name_map(config).leaves.items()}

    def padded(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        return padded_shape(path, shape, layout, numerics.kernels)

    def sharding(name: str) -> NamedSharding:
        path = tuple(name.split("."))
        shape = padded(path, whole[path])
        return NamedSharding(mesh, spec_of(name, param_axes(path, shape, layout), shape, layout))

    return {"placement": sharding, "padded": padded}


# Caches


def padded_rows(rows: int, layout: Layout) -> int:
    """Rows of a cache for a batch: a multiple of the devices that share them. The last ones stay empty."""
    shards = layout.data * layout.tensor
    return -(-rows // shards) * shards


def pages_of_shard(config: ModelConfig, numerics: Numerics, pages: int) -> int:
    """Pages of a device's pools, at least `pages`: whole lines of 128 index scales."""
    layouts: Iterable[PageLayout] = (PageLayout.of(config, numerics, ratio) for ratio in source_ratios(config))
    steps = [128 // math.gcd(128, layout.index_scale_words) for layout in layouts if layout.packed]
    step = math.lcm(*steps) if steps else 1
    return -(-pages // step) * step


def abstract_cache(
    config: ModelConfig, numerics: Numerics, mesh: Mesh, batch: int, max_len: int, pages: int | None = None
) -> CacheArrays:
    """A cache on a mesh, as ShapeDtypeStructs with shardings.

    Args:
        batch: rows, padded to a multiple of the devices that share them.
        pages: pages of each device's pools; default: enough for its rows.
    """
    layout = layout_of(mesh)
    arrays = abstract_arrays(
        config,
        numerics,
        padded_rows(batch, layout),
        max_len,
        cache_pages(config, numerics, layout, batch, max_len, pages),
    )
    return placed(mesh, arrays, cache_specs(arrays, layout))


def cache_pages(
    config: ModelConfig, numerics: Numerics, layout: Layout, batch: int, max_len: int, pages: int | None = None
) -> int:
    """Pages of the pools of all devices together; see `abstract_cache`."""
    shards = layout.data * layout.tensor
    if pages is None:
        pages = padded_rows(batch, layout) // shards * pages_for(max_len)
    return shards * pages_of_shard(config, numerics, pages)


def zero_cache(
    config: ModelConfig, numerics: Numerics, mesh: Mesh, batch: int, max_len: int, pages: int | None = None
) -> CacheArrays:
    """An empty cache made in its shards; every row owns the pages it can need. Page ids count within a device.

    With `pages` given, of each device's pools, rows own no page yet (all tables name page 0).
    """
    layout = layout_of(mesh)
    own = pages is None
    pages = cache_pages(config, numerics, layout, batch, max_len, pages)
    return _cache_maker(config, numerics, mesh, padded_rows(batch, layout), max_len, pages, own)()


@functools.lru_cache(maxsize=64)
def _cache_maker(
    config: ModelConfig, numerics: Numerics, mesh: Mesh, rows: int, max_len: int, pages: int, own: bool
) -> Callable[[], CacheArrays]:
    """What makes caches of a size, compiled once."""
    layout = layout_of(mesh)

    def make() -> CacheArrays:
        arrays = zero_arrays(config, numerics, rows, max_len, pages)
        per_row = arrays.page_table.shape[1]
        if not own:
            return arrays
        return arrays.replace(page_table=page_tables(rows, per_row, layout.data * layout.tensor))

    return jax.jit(make, out_shardings=shardings(mesh, cache_specs(jax.eval_shape(make), layout)))
