"""How one step is spread over devices: who computes what, and the exchanges between them.

A step runs as one program on every device of a mesh with the axes `data`, `context` and `tensor`:

    rows      a device owns whole sequences, and everything cached of them: rows are split over `data` and `tensor`
              together. `context` repeats the caches, and splits the tokens of a long block (prefill)
    matrices  the large dense ones are split over `tensor` by output columns, attention's by groups of heads. The rows
              of a tensor group come together for them (all-gather), each device computes its columns of all these
              rows, and the columns of a row go back to its owner (all-to-all). Every number is computed by one device,
              with a whole sum: splitting changes no result
    experts   each device owns a share of them; see `expert_parallel`

The methods of `Parallel` are those exchanges. They are the identity where an axis has one device, so a single device
runs the same code. They are called inside `jax.shard_map`; `sharding` says where arrays live.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

DATA, CONTEXT, TENSOR = AXES = ("data", "context", "tensor")
ROW_AXES = (DATA, TENSOR)
WEIGHT_BLOCK = 32  # rows of a stored FP8 matrix that share scales
LANES = 128  # columns that a TPU kernel computes side by side


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Sizes of the mesh axes, and choices of one step. Static under jit.

    Attributes:
        data, context, tensor: devices along each axis.
        split_block: the tokens of a block are split over `context`; otherwise every device of it computes all of them.
        dispatch: how tokens reach experts: "gather", "all_to_all" or "ragged", see `expert_parallel`.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    split_block: bool = False
    dispatch: str = "gather"

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.context * self.tensor

    @property
    def row_shards(self) -> int:
        """Devices among which rows are split."""
        return self.data * self.tensor

    @property
    def parts(self) -> int:
        """Parts into which the tokens of a block are split."""
        return self.context if self.split_block else 1

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes along which devices hold different tokens."""
        return AXES if self.parts > 1 else ROW_AXES

    def splits(self, columns: int, block: int = WEIGHT_BLOCK) -> bool:
        """Whether a matrix with so many outputs is split over `tensor`: in whole blocks, or not at all."""
        return self.tensor > 1 and columns % (self.tensor * block) == 0

    def padded(self, columns: int, kernels: bool) -> int:
        """Hidden columns of a shared expert with zeros added, so that kernels get whole lanes of each device's share:
        they would pad a copy of the weights in every step.
        """
        return -(-columns // (self.tensor * LANES)) * self.tensor * LANES if kernels and self.tensor > 1 else columns

    def share(self, columns: int, block: int = WEIGHT_BLOCK) -> int:
        """Outputs of a matrix that a device computes."""
        return columns // self.tensor if self.splits(columns, block) else columns

    # Columns

    def gather_rows(self, x: Array) -> Array:
        """The rows of the tensor group: [b, ...] -> [tensor * b, ...]."""
        return x if self.tensor == 1 else jax.lax.all_gather(x, TENSOR, axis=0, tiled=True)

    def gather_columns(self, x: Array) -> Array:
        """All columns of rows whose columns are spread over the tensor group: [..., n] -> [..., tensor * n]."""
        return x if self.tensor == 1 else jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True)

    def columns_to_rows(self, x: Array, axis: int = -1) -> Array:
        """Some columns of the group's rows [tensor * b, ..., n] -> all columns of the own rows [b, ..., tensor * n].

        `axis` is the one that holds columns.
        """
        if self.tensor == 1:
            return x
        # Buckets in front, each in one piece: the TPU compiler makes slow transposes of a split inside a row.
        axis %= x.ndim
        buckets = x.reshape(self.tensor, -1, *x.shape[1:])
        columns = jnp.moveaxis(jax.lax.all_to_all(buckets, TENSOR, 0, 0, tiled=True), 0, axis)
        return columns.reshape(*columns.shape[:axis], -1, *columns.shape[axis + 2 :])

    def rows_to_columns(self, x: Array, axis: int = -1) -> Array:
        """The opposite of `columns_to_rows`."""
        if self.tensor == 1:
            return x
        axis %= x.ndim
        buckets = jnp.moveaxis(x.reshape(*x.shape[:axis], self.tensor, -1, *x.shape[axis + 1 :]), axis, 0)
        rows = jax.lax.all_to_all(buckets, TENSOR, 0, 0, tiled=True)
        return rows.reshape(-1, *rows.shape[2:])

    def by_columns(self, linear: Callable[[Array], Array], x: Array, columns: int, block: int = WEIGHT_BLOCK) -> Array:
        """linear(x) [b, ..., columns] of the own rows x [b, ...], by a matrix that may be split.

        `linear` computes a device's columns of any rows.
        """
        if not self.splits(columns, block):
            return linear(x)
        return self.columns_to_rows(linear(self.gather_rows(x)))

    def from_columns(
        self, linear: Callable[[Array], Array], x: Array, columns: int, block: int = WEIGHT_BLOCK
    ) -> Array:
        """As `by_columns`, of rows whose columns are spread over the tensor group: x [tensor * b, ..., n]."""
        if not self.splits(columns, block):
            return linear(self.columns_to_rows(x))
        return self.columns_to_rows(linear(self.gather_columns(x)))

    # Tokens of a block

    def gather_block(self, x: Array, axis: int = 1) -> Array:
        """A block's tokens from all parts of it: [b, t / parts, ...] -> [b, t, ...]."""
        return x if self.parts == 1 else jax.lax.all_gather(x, CONTEXT, axis=axis, tiled=True)

    def first_token(self, tokens: int) -> Array | int:
        """Where this device's part of a block begins, when each part has `tokens` tokens."""
        return 0 if self.parts == 1 else jax.lax.axis_index(CONTEXT) * tokens

    def own_tokens(self, x: Array, tokens: int, axis: int = 1) -> Array:
        """This device's part [b, tokens, ...] of something of all tokens [b, t, ...]."""
        return x if self.parts == 1 else jax.lax.dynamic_slice_in_dim(x, self.first_token(tokens), tokens, axis)

    def pick_token(self, x: Array, token: Array, tokens: int) -> Array:
        """x [b, tokens, ...] at token [b] of the whole block: [b, ...], on every part the same."""
        place = token - self.first_token(tokens)
        index = jnp.clip(place, 0, tokens - 1).reshape(-1, *(1,) * (x.ndim - 1))
        own = jnp.take_along_axis(x, index, axis=1)[:, 0]
        if self.parts == 1:
            return own
        here = ((place >= 0) & (place < tokens)).reshape(-1, *(1,) * (own.ndim - 1))
        return jax.lax.psum(jnp.where(here, own, jnp.zeros_like(own)), CONTEXT)


SINGLE = Parallel()
