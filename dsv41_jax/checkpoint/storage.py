"""How a released tensor becomes part of a parameter leaf, and back: blocks of rows in, blocks of rows out, in numpy.

Released form          in the pytree
bf16, f32              as it is; float32 in numerics "float32"
FP8 weight + scale     as it is; dequantised to float32 without a scale in numerics "float32"
FP4 weight + scale     `expert_storage` "fp4": the same bytes as uint8; "fp8": the same values in E4M3, under the same
                       scales (every E2M1 value is an E4M3 value); "bf16": dequantised, no scale;
                       float32 in numerics "float32"

Blocks start at multiples of 32 rows, so that every 32x32 scale block lies in one of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41_jax import quant
from dsv41_jax.checkpoint.manifest import KIND_DTYPE, TensorSpec
from dsv41_jax.checkpoint.names import SCALED, Leaf, LeafPath, NameMap
from dsv41_jax.checkpoint.safetensors_file import DTYPES, CheckpointError

EXPERT_STORAGES = ("fp4", "fp8", "bf16")
BLOCK_ELEMENTS = 1 << 24  # values converted at a time, whatever the tensor's size: 64 MiB in float32

_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
_E2M1_AS_E4M3 = np.array(_E2M1, np.float32).astype(ml_dtypes.float8_e4m3fn)

_dequantize = jax.jit(quant.dequantize_weight, static_argnums=1)
_quantize_fp4 = jax.jit(quant.quantize_weight_fp4)
_quantize_fp8 = jax.jit(quant.quantize_weight_fp8, static_argnums=1)


@dataclass(frozen=True)
class Storage:
    """Forms of the parameters: `float32` dequantises everything, otherwise `experts` is one of EXPERT_STORAGES."""

    float32: bool = False
    experts: str = "fp4"

    def __post_init__(self) -> None:
        if self.experts not in EXPERT_STORAGES:
            raise ValueError(f"expert_storage={self.experts!r} is unknown; choose one of {', '.join(EXPERT_STORAGES)}")


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive blocks of rows of about BLOCK_ELEMENTS values; starts are multiples of 32."""
    step = max(quant.BLOCK, BLOCK_ELEMENTS // max(1, int(np.prod(shape[1:]))) // quant.BLOCK * quant.BLOCK)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def param_leaves(names: NameMap, storage: Storage) -> dict[LeafPath, tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of every leaf of the parameter pytree in `storage`."""
    result = {}
    for path, leaf in names.leaves.items():
        form = _param_form(leaf, storage)
        if form is not None:
            result[path] = ((*leaf.stack, *form[0]), np.dtype(form[1]))
    return result


def _param_form(leaf: Leaf, storage: Storage) -> tuple[tuple[int, ...], np.dtype] | None:
    kind = leaf.kind.removesuffix("_scale")
    dequantised = jnp.float32 if storage.float32 else None
    if dequantised is None and kind == "fp4" and storage.experts == "bf16":
        dequantised = jnp.bfloat16
    if leaf.kind != kind:
        return None if dequantised else (leaf.shape, DTYPES["F8_E8M0"])
    if kind != "fp4":
        return leaf.shape, dequantised or DTYPES[KIND_DTYPE[kind]]
    if not dequantised and storage.experts == "fp4":
        return leaf.shape, np.uint8
    return (leaf.shape[0], 2 * leaf.shape[1]), dequantised or ml_dtypes.float8_e4m3fn


def to_params(weight: np.ndarray, scale: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """Rows of a released tensor (and the scales that belong to them) in the leaf's `dtype` of `param_leaves`."""
    if weight.dtype == np.int8:
        codes = weight.view(np.uint8)
        if dtype == np.uint8:
            return codes
        if dtype == ml_dtypes.float8_e4m3fn:
            return _E2M1_AS_E4M3[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(len(codes), -1)
    if weight.dtype == dtype:
        return weight
    if scale is None:
        return weight.astype(dtype)
    return np.asarray(_dequantize({"weight": weight, "scale": scale}, dtype))


def to_released(
    rows: np.ndarray, row_scale: np.ndarray | None, spec: TensorSpec
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows of a parameter leaf in the released form of `spec`, and their scales if the rows had to be quantised.

    Args:
        rows: values in any form `to_params` gives, or float values to be quantised.
        row_scale: the scales of `rows`, used where these are in E4M3 but the released form is FP4.
        spec: the released tensor they are rows of.

    Raises:
        CheckpointError: values that are not finite, which no released format can hold.
    """
    released = DTYPES[spec.dtype]
    if rows.dtype == released:
        return rows, None
    if spec.kind == "fp4" and rows.dtype == np.uint8:
        return rows.view(np.int8), None
    if row_scale is not None:
        rows = np.asarray(_dequantize({"weight": rows, "scale": row_scale}, jnp.float32))
    rows = rows.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        raise CheckpointError(f"{spec.name}: holds values that are not finite, so the checkpoint was not written")
    if spec.kind not in SCALED:
        return rows.astype(released), None
    weight, scale = _quantize_fp4(rows) if spec.kind == "fp4" else _quantize_fp8(rows, spec.kind == "table")
    return np.asarray(weight).view(released), np.asarray(scale)


def check_scales(scale: np.ndarray, name: str, file: object, wanted: str) -> None:
    """Refuse scale byte 255 (NaN) where values are converted: CheckpointError naming the tensor and what to do."""
    if (scale.view(np.uint8) == 255).any():
        raise CheckpointError(
            f"{file}: {name}: holds the scale byte 255 (not a number), which {wanted} cannot represent; "
            "keep the stored form (expert_storage='fp4', numerics other than 'float32')"
        )
