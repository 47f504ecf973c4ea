"""Sizes of a mesh's axes, and which of them a model allows."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dsv41_jax.config import ModelConfig
from dsv41_jax.parallel import AXES, WEIGHT_BLOCK


class ShardingError(ValueError):
    """A mesh that a model, a batch or an array cannot be spread over."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; in text "DATAxCONTEXTxTENSOR"."""

    data: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ShardingError(f"mesh {self}: every axis needs at least one device")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """In the order of the mesh axes."""
        return self.data, self.context, self.tensor

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """From "DATAxCONTEXTxTENSOR", e.g. "4x1x4"; ShardingError for anything else."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ShardingError(f"mesh {text!r}: give three sizes DATAxCONTEXTxTENSOR, e.g. 4x1x4")
        return cls(*map(int, parts))

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """A mesh over these devices, or over all of the default backend.

        Raises:
            ShardingError: more or fewer devices than the layout has places.
        """
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) != self.devices:
            raise ShardingError(f"mesh {self} has {self.devices} places, but there are {len(devices)} devices")
        return Mesh(np.array(devices).reshape(self.sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def layout_of(mesh: Mesh) -> Layout:
    """The sizes of a mesh made by `Layout.mesh`; ShardingError for one with other axes, or other kinds of axes."""
    axes = tuple(getattr(mesh, "axis_names", ()))
    if axes != AXES:
        raise ShardingError(
            f"mesh: {type(mesh).__name__} with axes {axes}; needed are {AXES}: make it with sharding.Layout(...).mesh()"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ShardingError(
            f"mesh: axes of the kinds {mesh.axis_types}; needed are Auto ones: make it with sharding.Layout(...).mesh()"
        )
    return Layout(*(mesh.shape[axis] for axis in AXES))


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """Refuse a mesh that the model cannot be spread over: ShardingError saying why."""
    heads, groups, tensor = config.num_attention_heads, config.o_groups, layout.tensor
    if groups % tensor or heads % tensor or (heads * config.head_dim) % (tensor * WEIGHT_BLOCK):
        raise ShardingError(
            f"mesh {layout}: tensor={tensor} does not divide the model's {groups} groups of attention heads; "
            f"use a divisor of {groups}"
        )
    if (config.o_lora_rank * groups) % (tensor * WEIGHT_BLOCK):
        raise ShardingError(f"mesh {layout}: tensor={tensor} cuts through the blocks of 32 of wo_a")
