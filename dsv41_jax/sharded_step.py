"""The model's steps as one program for every device of a mesh: `model.extend`, `dspark.draft` and the loss inside
`jax.shard_map`, with the specs of `sharding`.

All functions here are traced inside `jax.jit`. Rows are those of the cache on the mesh (`sharding.padded_rows`); rows
without a sequence have n_valid 0.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import dspark, engram_share, model, sharding
from dsv41_jax.blocks import Params
from dsv41_jax.cache import CacheArrays, put_rows, take_rows
from dsv41_jax.config import ModelConfig
from dsv41_jax.numerics import FEW_TOKENS, Numerics
from dsv41_jax.parallel import AXES, CONTEXT, ROW_AXES, Parallel

ROWS = Spec(ROW_AXES)
_GATHER_TOKENS = 64  # of a device: more go to their experts by all-to-all


def parallel_of(mesh: Mesh, block: int = 1, rows: int = 1, dispatch: str | None = None) -> Parallel:
    """How a step with blocks of `block` tokens runs on a mesh.

    Args:
        rows: rows of a device.
        dispatch: see `expert_parallel`; None: "gather" for few tokens, "all_to_all" for many.
    """
    data, context, tensor = sharding.layout_of(mesh).sizes
    split = context > 1 and block > FEW_TOKENS and block % context == 0
    tokens = rows * (block // context if split else block)
    if dispatch is None:
        dispatch = "gather" if tokens <= _GATHER_TOKENS else "all_to_all"
    return Parallel(data, context, tensor, split, dispatch)


def local_rows(mesh: Mesh, rows: int) -> int:
    """Rows of a device."""
    layout = sharding.layout_of(mesh)
    return rows // (layout.data * layout.tensor)


def _token_spec(parallel: Parallel) -> Spec:
    return Spec(ROW_AXES, CONTEXT) if parallel.split_block else ROWS


def is_part(memory: Array) -> bool:
    """Whether an Engram input is a part that the devices have to sum, see `engram_share`."""
    return memory.dtype == jnp.uint32


def memory_specs(memory: dict[str, Array], tokens: Spec) -> dict[str, Spec]:
    """Specs of a step's Engram input, whose token arrays have the spec `tokens`."""
    return {name: Spec(AXES) if is_part(value) else tokens for name, value in memory.items()}


def whole_rows(config: ModelConfig, numerics: Numerics, memory: dict[str, Array]) -> dict[str, Array]:
    """A device's Engram input, with parts summed to the rows of its tokens."""
    form = engram_share.released_form(config)
    return {
        name: engram_share.summed_rows(numerics.parallel, value, form, numerics.dtype) if is_part(value) else value
        for name, value in memory.items()
    }


def extend(
    mesh: Mesh,
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    arrays: CacheArrays,
    token_ids: Array,
    start: Array,
    n_valid: Array,
    memory: dict[str, Array],
    image_mask: Array | None,
    image_embeds: Array | None,
    write_floor: Array,
    *,
    first: Array | None = None,
    layers: str = "all",
    all_logits: bool = False,
    dispatch: str | None = None,
) -> tuple[Array | None, CacheArrays]:
    """`model.extend` on a mesh: the same arguments and results, arrays as `sharding` places them, logits by rows.

    Args:
        first: int32 [devices that share rows]; each runs the rows from this one of its own on, as many as the inputs
            have for it. None: all rows.
    """
    layout = sharding.layout_of(mesh)
    rows, block = token_ids.shape
    numerics = numerics.spread(parallel_of(mesh, block, local_rows(mesh, rows), dispatch))
    tokens = _token_spec(numerics.parallel)

    def local(params, arrays, token_ids, start, n_valid, memory, image_mask, image_embeds, write_floor, first):
        memory = whole_rows(config, numerics, memory)
        own = arrays if first is None else take_rows(arrays, first[0], len(token_ids))
        logits, own = model.extend(
            config,
            numerics,
            params,
            own,
            token_ids,
            start,
            n_valid,
            memory,
            image_mask,
            image_embeds,
            write_floor,
            layers=layers,
            all_logits=all_logits,
        )
        return logits, own if first is None else put_rows(arrays, own, first[0])

    cache = sharding.cache_specs(arrays, layout)
    inputs = (tokens, ROWS, ROWS, memory_specs(memory, tokens), tokens, tokens, ROWS, ROWS)
    logits = None if layers == "encoder" else tokens if all_logits else ROWS
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(sharding.param_specs(params, layout), cache, *inputs),
        out_specs=(logits, cache),
        check_vma=False,
    )
    return step(params, arrays, token_ids, start, n_valid, memory, image_mask, image_embeds, write_floor, first)


def draft(
    mesh: Mesh,
    config: ModelConfig,
    numerics: Numerics,
    params: Params,
    arrays: CacheArrays,
    anchor: Array,
    start: Array,
    temperature: Array,
    keys: Array,
) -> tuple[Array, Array, Array]:
    """`dspark.draft` on a mesh, with a PRNG key for each row."""
    layout = sharding.layout_of(mesh)
    numerics = numerics.spread(parallel_of(mesh, config.dspark_block_size, local_rows(mesh, len(anchor)), "gather"))

    def local(params, arrays, anchor, start, temperature, keys):
        return dspark.draft(config, numerics, params, arrays, anchor, start, temperature, keys)

    specs = (sharding.param_specs(params, layout), sharding.cache_specs(arrays, layout), ROWS, ROWS, Spec(), ROWS)
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False)
    return step(params, arrays, anchor, start, temperature, keys)


def replicated(mesh: Mesh, tree: Any, rows: int) -> Any:
    """The first `rows` rows of every leaf, whole on every device: what a host reads."""
    whole = sharding.shardings(mesh, Spec())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[:rows], whole), tree)


# Steps that are planned ahead of time


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A step and its arguments as ShapeDtypeStructs with shardings, to be lowered for devices that may not be there.

    Attributes:
        function: of the arguments. donate: which of them it updates in place. names: what each of them is.
        numerics: as the devices run it.
        tokens: tokens of all rows in a step.
    """

    function: Any
    arguments: tuple
    names: tuple[str, ...]
    donate: tuple[int, ...]
    numerics: Numerics
    tokens: int

    def lower(self) -> jax.stages.Lowered:
        """Lowered for the devices of the mesh."""
        return jax.jit(self.function, donate_argnums=self.donate).lower(*self.arguments)


# Layers and tokens of a row; 0: as many as are asked for.
PHASES = {"decode": ("all", 1), "verify": ("all", FEW_TOKENS), "prefill": ("encoder", 0), "prefill_exact": ("all", 0)}


def engram_columns(config: ModelConfig) -> int:
    """Rows of a table that a token reads."""
    return (config.engram_max_ngram_size - 1) * config.engram_n_heads


def abstract_step(
    config: ModelConfig,
    numerics: Numerics,
    mesh: Mesh,
    *,
    phase: str = "decode",
    batch: int = 64,
    context: int = 131072,
    engram: str = "device",
    expert_storage: str = "fp4",
    block: int = 512,
    dispatch: str | None = None,
) -> AbstractStep:
    """The step of a phase at given sizes.

    Args:
        phase: "decode" (one token a row), "verify" (a block of 8 with all logits), "prefill" (the encoder on `block`
            tokens of each row, CED), or "prefill_exact" (all layers). Training has `training.planned`.
        batch: sequences; padded to a multiple of the devices that share rows. In prefill, too, each reads its block.
        context: tokens that a row of the cache holds.
        engram: "device", or "host": rows come as an input, where the mesh spans several processes as parts that the
            devices sum.

    Raises:
        ValueError: an unknown phase. ShardingError: the mesh does not suit the model.
    """
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r} is unknown; choose one of {', '.join(PHASES)}")
    layers, t = PHASES[phase]
    t = t or block
    layout = sharding.layout_of(mesh)
    params = sharding.abstract(config, numerics, mesh, engram=engram, expert_storage=expert_storage)
    arrays = sharding.abstract_cache(config, numerics, mesh, batch, context)
    rows = sharding.padded_rows(batch, layout)
    parallel = parallel_of(mesh, t, local_rows(mesh, rows), dispatch)
    tokens = _token_spec(parallel)

    def spec(shape: tuple[int, ...], dtype: Any, where: Spec = ROWS) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.shardings(mesh, where))

    columns = engram_columns(config)
    if engram == "device":
        row_input = spec((rows, t, columns), jnp.int32, tokens)
    elif len({device.process_index for device in mesh.devices.flat}) == 1:
        row_input = spec((rows, t, columns, config.engram_head_dim), numerics.dtype, tokens)
    else:
        words = engram_share.released_form(config).words
        of_all = (layout.devices, rows * parallel.parts, t // parallel.parts, columns, words)
        row_input = spec(of_all, jnp.uint32, Spec(AXES))
    memory = {f"l{layer}": row_input for layer in config.engram_layer_ids}
    inputs = {
        "token_ids": spec((rows, t), jnp.int32, tokens),
        "start": spec((rows,), jnp.int32),
        "n_valid": spec((rows,), jnp.int32),
        "memory": memory,
        "write_floor": spec((rows,), jnp.int32),
    }

    def function(params, arrays, inputs):
        return extend(
            mesh,
            config,
            numerics,
            params,
            arrays,
            **inputs,
            image_mask=None,
            image_embeds=None,
            layers=layers,
            all_logits=phase == "verify",
            dispatch=dispatch,
        )

    names = ("params", "cache", "inputs")
    return AbstractStep(function, (params, arrays, inputs), names, (1,), numerics, rows * t)
