"""Attention layers with their caches: the golden stack, a prefill and 7 steps, and the mistakes it must see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_stack as stack
from attention_stack import CALLS, GOLD, LAYERS, compare
from dsv41_jax import cached_block, csa2
from dsv41_jax.layer_map import Mode
from module_golden import assert_close

PREFILL_ONLY = ("window_kv", "o", "index_q", "index_weights")
ENTRIES = ("latent_prerope", "latent_cached", "index_k")
NAMES = ("out", "topk", "score", "candidates", *PREFILL_ONLY, *ENTRIES)


def test_map_of_the_stack():
    assert [(run.mode, run.ratio, kv, index) for run, _, kv, index in stack.runs()] == [
        (Mode.WINDOW, 0, 0, 0),
        (Mode.FULL, 2, 0, 0),
        (Mode.FULL, 1, 0, 1),
        (Mode.REINDEX, 1, 0, 2),
    ]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("call", CALLS)
def test_attention_stack_equals_golden(call, layer):
    checked = compare(stack.recorded()[call], call, layer, NAMES)
    begin, end = stack.span(call)
    expected = {"out"}
    if layer > 0:
        expected |= {"topk", "score"}
    if call.startswith("prefill"):
        expected |= set(PREFILL_ONLY if layer > 0 else PREFILL_ONLY[:2])
    if layer in (1, 2) and stack.entries(layer, end) > stack.entries(layer, begin):
        expected |= set(ENTRIES)
    if layer == 2:
        expected.add("candidates")
    assert checked == expected


def test_steps_do_not_read_another_sources_keys():
    """The uncorrected reference scored a ratio 2 step without a new entry against the ratio 1 source's keys."""
    own = [stack.recorded()[call][1]["topk"] for call in CALLS[1:]]
    differs = [(GOLD[f"layer1.stale.{call}.topk"] != rows).any() for call, rows in zip(CALLS[1:], own, strict=True)]
    assert any(differs[1::2]) and not any(differs[::2])


def test_any_split_gives_the_same_state_and_outputs():
    whole, _ = stack.feed(stack.step, stack.empty_state(), 0, stack.PREFILL)
    state, parts = stack.empty_state(), []
    for begin, end in ((0, 5), (5, 6), (6, 13), (13, 14), (14, 22), (22, 23)):
        state, records = stack.feed(stack.step, state, begin, end)
        parts.append(records)
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), whole, state)
    assert jax.tree.all(equal), equal
    for layer in range(LAYERS):
        want = stack.recorded()[CALLS[0]][layer]
        # The softmax adds its terms in another order, so a few outputs may round differently.
        assert_close(np.concatenate([part[layer]["out"] for part in parts], axis=1), want["out"])
        if "topk" in want:
            np.testing.assert_array_equal(np.concatenate([part[layer]["topk"] for part in parts], axis=1), want["topk"])


def test_rows_of_different_lengths_do_not_touch_each_other():
    """Row 1 is three tokens behind row 0; each computes, bit by bit, what it does in step with the other."""
    params, first, late = stack.stack_params(), np.array([8, 5], np.int32), stack.inputs(8).copy()
    state, _ = stack.step(params, stack.empty_state(), stack.inputs(0), stack.both(0), first)
    late[:, 1] = stack.inputs(5)[:, 1]
    _, ragged = stack.step(params, state, late, first, stack.both(8))
    for row, begin in enumerate(first):
        state, _ = stack.feed(stack.step, stack.empty_state(), 0, int(begin))
        _, even = stack.feed(stack.step, state, int(begin), int(begin) + 8)
        for layer in range(LAYERS):
            for name in {"out", "o", "window_kv", "topk"} & set(even[layer]):
                got, want = ragged[layer][name][row], even[layer][name][row]
                np.testing.assert_array_equal(got, want, err_msg=f"{name} of layer {layer}, row {row}")


def test_a_row_computes_the_same_in_another_slot():
    start, n = stack.both(0), stack.both(8)
    state, records = stack.step(stack.stack_params(), stack.empty_state(), stack.inputs(0), start, n)
    swapped, again = stack.step(stack.stack_params(), stack.empty_state(), stack.inputs(0)[:, ::-1], start, n)
    for want, got in zip(records, again, strict=True):
        for name, value in want.items():
            np.testing.assert_array_equal(value, got[name][::-1], err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:, ::-1]), state.window, swapped.window)


# Negative controls, on the window-only layer. Each mistake takes a traced switch: one compiled program serves them all.


def query_norm(patch, on):
    def queries(self, y, cos, sin):
        qr, q = real(self, y, cos, sin)
        wide = q.astype(jnp.float32)
        normed = self.numerics.round(wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True)))
        return qr, jnp.where(on, normed, q)

    real = csa2.Attention.queries
    patch.setattr(csa2.Attention, "queries", queries)


def rope_bases_swapped(patch, on):
    real = cached_block.layer_frequencies

    def swapped(config, compressed):
        return jnp.where(on, real(config, not compressed), real(config, compressed))

    patch.setattr(cached_block, "layer_frequencies", swapped)


def sink_dropped(patch, on):
    real = csa2.attend
    patch.setattr(csa2, "attend", lambda *a: real(*a[:5], jnp.where(on, -jnp.inf, a[5]), a[6]))


def inverse_rotation_left_out(patch, on):
    def rotate_tail(x, cos, sin, numerics, inverse=False):
        rotated = real(x, cos, sin, numerics, inverse)
        return jnp.where(on, x, rotated) if inverse else rotated

    real = csa2.rotate_tail
    patch.setattr(csa2, "rotate_tail", rotate_tail)


def window_one_short(patch, on):
    real = csa2.attend

    def attend(q, kv, mask, *rest):
        first = jnp.argmax(mask, axis=-1, keepdims=True) == jnp.arange(mask.shape[-1])
        return real(q, kv, jnp.where(on, mask & ~first, mask), *rest)

    patch.setattr(csa2, "attend", attend)


MISTAKES = (query_norm, rope_bases_swapped, sink_dropped, inverse_rotation_left_out, window_one_short)


@functools.cache
def broken_step():
    def run(on, *args):
        with pytest.MonkeyPatch.context() as patch:
            for i, mistake in enumerate(MISTAKES):
                mistake(patch, on == i)
            return stack.run_stack(*args, layers=1)

    return jax.jit(run)


def records_with(mistake: int) -> list[dict[str, np.ndarray]]:
    return stack.feed(functools.partial(broken_step(), mistake), stack.empty_state(), 0, stack.PREFILL)[1]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_fails_the_golden_comparison(mistake):
    records = records_with(MISTAKES.index(mistake))
    with pytest.raises(AssertionError):
        compare(records, CALLS[0], 0, ("out",))


def test_without_a_mistake_the_switched_program_passes():
    records = records_with(-1)
    assert compare(records, CALLS[0], 0, ("out",)) == {"out"}
