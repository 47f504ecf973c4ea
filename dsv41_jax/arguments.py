"""Checks of what callers pass in. Each error names the argument, its value and the rule, before anything heavy."""

import functools
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41_jax.config import ModelConfig

if TYPE_CHECKING:
    from dsv41_jax.cache import Cache, CacheArrays
    from dsv41_jax.numerics import Numerics

_INT32_MAX = 2**31 - 1


def is_whole(value: object) -> bool:
    """Whether a value is a whole number of Python or numpy; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number of Python or numpy; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number from `least` to `most` as an int; ValueError otherwise."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r}: a whole number {rule} is needed")
    return int(value)


def check_real(name: str, value: object, least: float, most: float) -> float:
    """A real number from `least` to `most` as a float; ValueError otherwise, NaN included."""
    if not (is_real(value) and least <= value <= most):
        raise ValueError(f"{name}={value!r}: a number from {least:g} to {most:g} is needed")
    return float(value)


def check_text(name: str, text: object, empty: bool = False) -> str:
    """Text that has a UTF-8 form: TypeError for anything but a str, ValueError for "" (unless `empty`) and for lone
    surrogates.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} is {text!r}: a string is needed, not {type(text).__name__}")
    if not text and not empty:
        raise ValueError(f"{name} is '': a non-empty string is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(f"{name} holds a lone surrogate {text[at]!r} at {at}: UTF-8 has no such character") from None
    return text


def whole_array(name: str, value: object) -> np.ndarray:
    """`value` as int32, without truncating anything.

    Raises:
        ValueError: no rectangular array, other than whole numbers, or numbers beyond int32.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} is not a rectangular array: {error}") from None
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be whole numbers, got {array.dtype} {array.shape}")
    if array.size and (array.max() > _INT32_MAX or array.min() < -_INT32_MAX):
        raise ValueError(f"{name} must fit int32, got {array.min()}..{array.max()}")
    return array.astype(np.int32)


def check_ids(
    config: ModelConfig, token_ids: object, ndim: int | tuple[int, ...], name: str = "token_ids"
) -> np.ndarray:
    """Token ids as int32.

    Raises:
        ValueError: a wrong number of axes, no tokens, anything but whole numbers, or ids outside the vocabulary.
    """
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise ValueError(f"{name} is not a rectangular array: {error}") from None
    if ids.ndim not in allowed or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        axes = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must be whole numbers in an array of {axes} axes, got {ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"{name} must lie in 0..{config.vocab_size - 1}, got {ids.min()}..{ids.max()}")
    return ids.astype(np.int32)


def check_id_list(config: ModelConfig, name: str, token_ids: object) -> tuple[int, ...]:
    """Some token ids, maybe none, as a tuple: TypeError unless iterable, ValueError as `check_ids`."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise TypeError(f"{name}={token_ids!r}: a list of token ids is needed")
    ids = list(token_ids)
    return tuple(check_ids(config, ids, 1, name).tolist()) if ids else ()


def check_lengths(lengths: object, rows: int, longest: int) -> np.ndarray:
    """int32 [rows] of lengths from 1 to `longest`; None is all `longest`."""
    if lengths is None:
        return np.full(rows, longest, np.int32)
    array = whole_array("lengths", lengths)
    if array.shape != (rows,) or (array < 1).any() or (array > longest).any():
        raise ValueError(f"lengths={array.tolist()}: one number from 1 to {longest} is needed for each of {rows} rows")
    return array


def check_prompt_length(config: ModelConfig, tokens: int, name: str = "token_ids has rows") -> None:
    """ValueError where `tokens` are more than the model's positions."""
    limit = config.max_position_embeddings
    if tokens > limit:
        raise ValueError(f"{name} of {tokens} tokens, more than max_position_embeddings={limit}")


def check_max_len(config: ModelConfig, max_len: object, tokens: int) -> int:
    """Tokens a row of a cache holds, at least the prompt's `tokens`."""
    limit = config.max_position_embeddings
    if not is_whole(max_len) or not tokens <= max_len <= limit:
        raise ValueError(
            f"max_len={max_len!r}: it must hold the prompt of {tokens} tokens and be a whole number of at most "
            f"max_position_embeddings={limit}"
        )
    return int(max_len)


def check_segments(segment_ids: object, shape: tuple[int, ...]) -> np.ndarray:
    """Segment ids int32 of the shape of the token ids."""
    segments = whole_array("segment_ids", segment_ids)
    if segments.shape != shape:
        raise ValueError(f"segment_ids has shape {segments.shape}, token_ids {shape}")
    return segments


def check_cache(config: ModelConfig, numerics: "Numerics", mesh: Mesh | None, cache: "Cache", rows: int) -> None:
    """Whether a cache is for `rows` rows of this model, on these devices.

    Raises:
        TypeError: no cache. ValueError: another number of rows, other numerics, another mesh, or another model's
            shapes. RuntimeError: a spent cache.
    """
    from dsv41_jax.cache import Cache  # it imports the layers, which use these checks

    if not isinstance(cache, Cache):
        raise TypeError(f"cache is {type(cache).__name__}: a dsv41_jax.Cache is needed")
    if rows != len(cache.lengths):
        raise ValueError(f"token_ids has {rows} rows, the cache {len(cache.lengths)}")
    if cache.numerics != numerics.name:
        raise ValueError(f"the cache was made with numerics={cache.numerics!r}, this model has {numerics.name!r}")
    if cache.mesh != mesh:
        made, here = ("one device" if m is None else f"a mesh of {m.devices.shape} devices" for m in (cache.mesh, mesh))
        raise ValueError(
            f"the cache was made on {made}, this model is on {here} or on other devices: its rows and pages do not fit"
        )
    arrays = cache.peek()
    if _row_state(arrays) != _expected_row_state(config, numerics, len(arrays.encoder_floor)):
        raise ValueError("the cache is of another model: its windows have other shapes")


def _row_state(arrays: "CacheArrays") -> tuple:
    parts = (arrays.window, arrays.draft_window, arrays.tail_values)
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(parts))


@functools.cache
def _expected_row_state(config: ModelConfig, numerics: "Numerics", rows: int) -> tuple:
    from dsv41_jax.cache import abstract_arrays

    return _row_state(abstract_arrays(config, numerics, rows, 1))
