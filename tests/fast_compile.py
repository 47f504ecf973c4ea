"""Compiler settings for tests whose cost is compiling: the same sums from code that is not optimised."""

import functools
from collections.abc import Callable

import jax

from dsv41_jax import runner

# Taken here, before a test replaces them.
_STEP, _DRAFT = runner._extend.__wrapped__, runner._draft.__wrapped__
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@functools.cache
def fast_compile() -> dict[str, int | bool]:
    """`compiler_options` of `jax.jit` that compile a model about three times faster; those this jaxlib knows."""

    def known(name: str, value: int | bool) -> bool:
        try:
            jax.jit(lambda x: x, compiler_options={name: value})(0.0)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in _OPTIONS.items() if known(name, value)}


@functools.cache
def fast_steps() -> dict[str, Callable]:
    """The jitted steps of `dsv41_jax.runner` by name, compiled that way; made once, so that tests share programs."""
    static = ("config", "numerics")
    step = jax.jit(
        _STEP,
        static_argnames=(*static, "layers", "all_logits"),
        donate_argnames=("arrays",),
        compiler_options=fast_compile(),
    )
    return {"_extend": step, "_draft": jax.jit(_DRAFT, static_argnames=static, compiler_options=fast_compile())}


def use_fast_steps(monkeypatch) -> None:
    """Let `runner` use the fast-compiling steps for the duration of a monkeypatch."""
    for name, step in fast_steps().items():
        monkeypatch.setattr(runner, name, step)
