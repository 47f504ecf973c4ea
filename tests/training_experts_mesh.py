"""What is run with eight devices by test_training_experts.py: gradients of experts across devices."""

from __future__ import annotations

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dsv41_jax import expert_rounds, sharding
from dsv41_jax.checkpoint.names import flatten, nest
from dsv41_jax.moe import MoE
from dsv41_jax.numerics import FLOAT32, QUANTIZED_TRAINING, Numerics
from dsv41_jax.parallel import ROW_AXES, Parallel
from dsv41_jax.router_notes import TokenFacts

HIDDEN, INTER, EXPERTS, TOPK = 64, 32, 12, 3  # two experts on a device of eight, none on two devices
ROWS, TOKENS = 8, 16
LAYOUTS = [sharding.Layout(8, 1, 1), sharding.Layout(2, 2, 2)]
LOADS = {
    "as it comes": np.zeros(EXPERTS),
    "all tokens to one expert": np.where(np.arange(EXPERTS) == 1, 100.0, 0.0),
    "all tokens to the same three experts": np.where(np.arange(EXPERTS) < 3, 100.0, 0.0),
}


def module(numerics: Numerics) -> MoE:
    return MoE(EXPERTS, TOPK, INTER, "sqrtsoftplus", True, 1.5, 10.0, numerics)


def inputs() -> tuple[dict, jax.Array, jax.Array, TokenFacts]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ROWS, TOKENS, HIDDEN))
    params = jax.jit(module(FLOAT32).init)(keys[1], x)["params"]
    samples = jnp.broadcast_to(jnp.arange(TOKENS) // 5, (ROWS, TOKENS)).astype(jnp.int32)
    facts = TokenFacts(samples, jnp.ones((ROWS, TOKENS)).at[:, -1].set(0))
    return params, x, jax.random.normal(keys[2], x.shape), facts


def biased(params: dict, load: str) -> dict:
    bias = jnp.asarray(LOADS[load], jnp.float32)
    return {**params, "gate": {**params["gate"], "bias": bias, "bias_vl": bias}}


def sums(numerics: Numerics, params: dict, x: jax.Array, direction: jax.Array, facts: TokenFacts):
    """A loss with both kinds of gradients, and the notes, as sums over tokens."""
    image = jnp.arange(TOKENS) % 4 == 1
    y, notes = module(numerics).apply({"params": params}, x, jnp.broadcast_to(image, x.shape[:2]), facts)
    return jnp.sum(y * direction) + 0.1 * notes.balance, (notes.loads, notes.dropped)


def spread(parallel: Parallel, numerics: Numerics):
    """`sums` on a mesh, of whole parameters."""
    layout = sharding.Layout(parallel.data, parallel.context, parallel.tensor)

    def run(params: dict, x: jax.Array, direction: jax.Array, facts: TokenFacts):
        stacked = {("layers", "ffn", *path): leaf[None] for path, leaf in flatten(params)}
        for path, leaf in stacked.items():
            shape = sharding.padded_shape(path, leaf.shape, layout, False)
            stacked[path] = jnp.pad(leaf, [(0, n - m) for n, m in zip(shape, leaf.shape, strict=True)])
        specs = sharding.param_specs(nest(stacked), layout)["layers"]["ffn"]
        padded = jax.tree.map(lambda leaf: leaf[0], nest(stacked)["layers"]["ffn"])
        specs = jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda spec: isinstance(spec, P))

        def local(*arguments):
            return jax.lax.psum(sums(numerics.spread(parallel), *arguments), ROW_AXES)

        rows, mesh = P(ROW_AXES), layout.mesh(jax.devices()[: layout.devices])
        step = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows, rows, rows), out_specs=P(), check_vma=False)
        return step(padded, x, direction, facts)

    return run


def lost_pairs() -> None:
    """Negative control: after one round of several, what is left shows as dropped."""
    params, x, direction, facts = inputs()
    tree = biased(params, "all tokens to the same three experts")
    run = spread(Parallel(8, 1, 1, False, "all_to_all"), FLOAT32)
    with mock.patch.object(expert_rounds.Rounds, "needed", lambda _: 1):
        _, (_, dropped) = jax.jit(run)(tree, x, direction, facts)
    capacity = expert_rounds.trained_capacity(TOKENS * TOPK, 8, HIDDEN)
    assert dropped == 8 * (2 * TOKENS - capacity)  # two experts of each token on one device, one on another


def gradients() -> None:
    """Loss, gradients and loads of the rounds equal one device's, whatever the load; nothing is dropped."""
    # Two pairs of every token for one device take several rounds.
    assert expert_rounds.trained_capacity(TOKENS * TOPK, 8, HIDDEN) < 2 * TOKENS
    check_gradients(FLOAT32, LAYOUTS)
    with mock.patch.object(expert_rounds, "TRAINED_ROUND_BYTES", 0):  # rounds of 8 pairs: several whatever the load
        check_gradients(QUANTIZED_TRAINING, LAYOUTS[:1])


def check_gradients(numerics: Numerics, layouts: list[sharding.Layout]) -> None:
    params, x, direction, facts = inputs()
    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    one = jax.jit(gradient(functools.partial(sums, numerics)))
    many = {
        layout: jax.jit(gradient(spread(Parallel(*layout.sizes, False, "all_to_all"), numerics))) for layout in layouts
    }
    for name, layout in itertools.product(LOADS, layouts):
        tree = biased(params, name)
        (wanted, (loads, _)), wanted_grads = one(tree, x, direction, facts)
        (got, (got_loads, dropped)), grads = many[layout](tree, x, direction, facts)
        message = f"{name}, {layout}, {numerics.name}"
        assert dropped == 0, message
        np.testing.assert_array_equal(got_loads, loads, err_msg=message)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, err_msg=message)
        others = dict(flatten({"params": grads[0], "x": {"x": grads[1]}}))
        for path, leaf in flatten({"params": wanted_grads[0], "x": {"x": wanted_grads[1]}}):
            # Sums in another order: float32 noise of the largest entry.
            allowed = 3e-6 * max(np.abs(leaf).max(), 1e-3)
            np.testing.assert_allclose(others[path], leaf, rtol=0, atol=allowed, err_msg=f"{message}, {path}")


def all_to_all() -> None:
    gradients()
    lost_pairs()
