"""What one step tells the devices, as plain arrays: every host of a pod runs the same ones in the same order.

A step as bytes is a line of JSON (its kind, and the names, dtypes and shapes of its arrays) and the arrays' bytes.
"""

import dataclasses
import json
import math

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16 by name)
import numpy as np

from dsv41_jax.image_plan import Grid


@dataclasses.dataclass(frozen=True, eq=False)
class SetRows:
    """Rows of the cache begin anew, or have got more pages.

    Attributes:
        rows: int32 [k]. tables: int32 [k, P], their page tables, ids within the device that holds the row.
        floors: int32 [2, k], where the windows of encoder and decoder begin.
    """

    rows: np.ndarray
    tables: np.ndarray
    floors: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A block of tokens of consecutive rows, or on a mesh of one row of each device, through the encoder or all layers;
    see `model.extend`.

    Attributes:
        first: the first of the rows. own_rows: int32 [b], instead, each device's row, counted within the device.
        layers: "encoder" or "all".
        token_ids: int32 [b, t]. start, n_valid, write_floor: int32 [b].
        engram_rows: int32 or int64 [Engram layers, b, t, columns], or None without Engram. announced: those of a later
            block, which tables off the device may read meanwhile.
        image_mask: bool [b, t], with image_embeds [b, t, D]; None for text.
    """

    first: int
    layers: str
    token_ids: np.ndarray
    start: np.ndarray
    n_valid: np.ndarray
    write_floor: np.ndarray
    engram_rows: np.ndarray | None = None
    announced: np.ndarray | None = None
    image_mask: np.ndarray | None = None
    image_embeds: np.ndarray | None = None
    own_rows: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class EmbedImage:
    """The span of one image: patches float32 [n, 3, p, p] of a grid (rows, columns)."""

    patches: np.ndarray
    grid: Grid


Step = SetRows | Block | EmbedImage
_KINDS = {kind.__name__: kind for kind in (SetRows, Block, EmbedImage)}


def to_bytes(step: Step) -> bytes:
    """A step as bytes."""
    plain, layout, parts = {}, [], []
    for field in dataclasses.fields(step):
        value = getattr(step, field.name)
        if isinstance(value, np.ndarray):
            layout.append([field.name, str(value.dtype), value.shape])
            parts.append(np.ascontiguousarray(value).tobytes())
        elif value is not None:
            plain[field.name] = value
    head = json.dumps({"kind": type(step).__name__, "plain": plain, "arrays": layout})
    return head.encode() + b"\n" + b"".join(parts)


def from_bytes(raw: bytes) -> Step:
    """The step that `to_bytes` wrote; ValueError for anything else."""
    end = raw.find(b"\n")
    head = json.loads(raw[: max(end, 0)])
    values, at = head["plain"], end + 1
    kinds = [(name, np.dtype(dtype), shape) for name, dtype, shape in head["arrays"]]
    whole = at + sum(math.prod(shape) * kind.itemsize for _, kind, shape in kinds)
    if whole != len(raw):
        raise ValueError(f"a step of {whole} bytes came as {len(raw)}")
    for name, kind, shape in kinds:
        values[name] = np.frombuffer(raw, kind, math.prod(shape), at).reshape(shape)
        at += values[name].nbytes
    if "grid" in values:
        values["grid"] = tuple(values["grid"])
    return _KINDS[head["kind"]](**values)
