"""The next token of every row, each by its own request's options.

Settings, counts and logits of all rows stay on the device. All rows are drawn together, whichever of them are wanted,
so one program does it, and a row's token does not depend on the others.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.completion import TokenLogprob
from dsv41_jax.runner import counted
from dsv41_jax.sampling import (
    RowSettings,
    SamplingOptions,
    TokenCounts,
    row_keys,
    row_settings,
    sampling_logits,
    token_logprobs,
)


@flax.struct.dataclass
class _State:
    """settings and counts of all rows; logits float32 [rows, V]."""

    settings: RowSettings
    counts: TokenCounts
    logits: Array


@functools.partial(jax.jit, donate_argnames=("state",))
@counted
def _start(state: _State, row: Array, settings: RowSettings, in_prompt: Array, in_output: Array) -> _State:
    def put(whole: Array, own: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, own, row, 0)

    counts = TokenCounts(in_prompt, in_output)
    return state.replace(
        settings=jax.tree.map(put, state.settings, settings), counts=jax.tree.map(put, state.counts, counts)
    )


@functools.partial(jax.jit, donate_argnames=("state",))
@counted
def _put(state: _State, logits: Array, rows: Array) -> _State:
    own = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
    return state.replace(logits=state.logits.at[rows].set(own, mode="drop"))


@functools.partial(jax.jit, donate_argnames=("state",))
@counted
def _choose(state: _State, wanted: Array, step: Array, mask: Array | None) -> tuple[Array, _State]:
    logits = state.logits
    if mask is not None:
        ids = jnp.arange(logits.shape[-1])
        allowed = (mask[:, ids // 32] >> (ids % 32).astype(jnp.uint32)) & 1
        logits = jnp.where(allowed == 1, logits, -jnp.inf)
    keys = row_keys(state.settings, step)
    drawn = sampling_logits(logits, state.settings, state.counts)
    tokens = jax.vmap(jax.random.categorical)(keys, drawn).astype(jnp.int32)
    counts = state.counts.in_output.at[jnp.arange(len(tokens)), tokens].add(wanted)
    return tokens, state.replace(counts=state.counts.replace(in_output=counts))


class Sampler:
    """Options and logits of `rows` rows over a vocabulary of `vocab` ids."""

    def __init__(self, rows: int, vocab: int):
        self.rows, self.vocab = rows, vocab
        self._state = _State(
            settings=row_settings([SamplingOptions()] * rows, [0] * rows, vocab),
            counts=TokenCounts(jnp.zeros((rows, vocab), bool), jnp.zeros((rows, vocab), jnp.int32)),
            logits=jnp.zeros((rows, vocab), jnp.float32),
        )

    def start(self, row: int, sampling: SamplingOptions, stream: int, prompt: np.ndarray, output: list[int]) -> None:
        """A request begins in a row; `output`: what was written before, of one that begins again."""
        in_prompt = np.zeros((1, self.vocab), bool)
        in_prompt[0, prompt] = True
        in_output = np.bincount(np.asarray(output, np.int64), minlength=self.vocab).astype(np.int32)[None]
        settings = row_settings([sampling], [stream], self.vocab)
        self._state = _start(self._state, np.int32(row), settings, in_prompt, in_output)

    def put(self, logits: Array, rows: np.ndarray) -> None:
        """New logits [b, V] or [b, 1, V] of the rows int32 [b]; those of row -1 are dropped."""
        self._state = _put(self._state, logits, np.where(rows < 0, self.rows, rows).astype(np.int32))

    def choose(self, wanted: np.ndarray, steps: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """Draw tokens.

        Args:
            wanted: bool [rows], whose token counts. steps: int32 [rows], tokens that each has drawn before.
            mask: uint32 [rows, ceil(V / 32)], which ids are allowed (see `request.Constraint`); None: all.

        Returns:
            int32 [rows]; those of rows that are not wanted mean nothing.
        """
        tokens, self._state = _choose(self._state, wanted.astype(np.int32), steps.astype(np.int32), mask)
        return np.asarray(tokens)

    def logprobs(self, tokens: np.ndarray, top: dict[int, int]) -> dict[int, TokenLogprob]:
        """Log probabilities of the tokens [rows] of some rows, {row: how many of the likeliest}."""
        chosen, best, ids = map(np.asarray, token_logprobs(self._state.logits, jnp.asarray(tokens)))
        found = {}
        for row, count in top.items():
            pairs = zip(ids[row, :count].tolist(), best[row, :count].tolist(), strict=True)
            found[row] = TokenLogprob(int(tokens[row]), float(chosen[row]), tuple(pairs))
        return found
