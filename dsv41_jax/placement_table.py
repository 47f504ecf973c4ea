"""Where every array of a model lives, as a table: `python -m dsv41_jax.placement_table --mesh=16x1x4`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from dsv41_jax import sharding
from dsv41_jax.cache import CacheArrays
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.numerics import RELEASED
from dsv41_jax.parallel import AXES

GIB = 2**30


def _arrays(params: dict, cache: CacheArrays) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    for path, leaf in flatten(params):
        yield ".".join(path), leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(cache)[0]:
        yield "cache." + ".".join(getattr(key, "name", None) or str(key.key) for key in path), leaf


def spelled(spec: PartitionSpec) -> str:
    """A PartitionSpec in words: "1: data, tensor" splits dimension 1 over those axes; "whole" is on every device."""
    axes = {dim: (entry,) if isinstance(entry, str) else entry for dim, entry in enumerate(spec)}
    return "; ".join(f"{dim}: {', '.join(entry)}" for dim, entry in axes.items() if entry) or "whole"


def table(config: ModelConfig, layout: sharding.Layout, batch: int, context: int) -> str:
    """A Markdown table of the arrays of the released numerics and where they live on a mesh.

    Args:
        batch: sequences of the cache. context: tokens of each.

    Raises:
        ShardingError: the mesh does not suit the model.
    """
    mesh = AbstractMesh(layout.sizes, AXES)
    params = sharding.abstract(config, RELEASED, mesh)
    cache = sharding.abstract_cache(config, RELEASED, mesh, batch, context)
    lines = ["| array | shape | split | GiB in all | GiB a device |", "|---|---|---|---|---|"]
    sums = [0.0, 0.0]
    for name, x in _arrays(params, cache):
        shapes = (x.shape, x.sharding.shard_shape(x.shape))
        sizes = [math.prod(shape) * x.dtype.itemsize / GIB for shape in shapes]
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        numbers = " | ".join(f"{size:.3f}" if size >= 0.0005 else "" for size in sizes)
        lines.append(f"| `{name}` | {', '.join(map(str, x.shape))} | {spelled(x.sharding.spec)} | {numbers} |")
    return "\n".join([*lines, f"| all | | | {sums[0]:.3f} | {sums[1]:.3f} |"])


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.placement_table", description=__doc__)
    parser.add_argument("--config", default="configs/flash.py", help="a config file or folder (default: %(default)s)")
    parser.add_argument("--mesh", default="16x1x4", help="DATAxCONTEXTxTENSOR (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of the cache (default: %(default)s)")
    parser.add_argument("--context", type=int, default=131072, help="tokens of each (default: %(default)s)")
    flags = parser.parse_args(argv)
    try:
        print(table(load_config(flags.config), sharding.Layout.parse(flags.mesh), flags.batch, flags.context))
    except (ValueError, OSError) as error:
        print(f"placement_table: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
