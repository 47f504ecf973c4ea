"""Who computes an operation: the reference or a kernel.

auto        the kernel of the default backend (TPU, CUDA GPU), else the reference; reported once by logging
reference   plain jax.numpy, everywhere
tpu         the Mosaic kernel; also for ahead-of-time compilation on a machine without a TPU
gpu         the Triton kernel; likewise
interpret   the TPU kernel, interpreted on any machine: slow, for tests
"""

import functools
import logging
from collections.abc import Callable

import jax

IMPLEMENTATIONS = ("auto", "reference", "tpu", "gpu", "interpret")

_log = logging.getLogger(__name__)


class KernelError(ValueError):
    """An operation was asked for something that its kernel does not do; says what, and what it does."""


def traced_once(*static: str) -> Callable[[Callable], Callable]:
    """Decorator of a kernel's entry: calls with the same shapes and the same `static` arguments are traced and lowered
    once in a program. A model calls a kernel from layers of many kinds, and tracing a kernel's body takes seconds.
    """
    return functools.partial(jax.jit, static_argnames=static)


def check(implementation: str) -> None:
    """KernelError for a name that is not in IMPLEMENTATIONS."""
    if implementation not in IMPLEMENTATIONS:
        raise KernelError(f"implementation={implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")


@functools.cache
def automatic() -> str:
    """What "auto" means in this process."""
    backend = jax.default_backend()
    chosen = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}.get(backend, "reference")
    _log.info("implementation auto: %s, because the default backend is %s", chosen, backend)
    return chosen


def resolve(operation: str, implementation: str) -> str:
    """ "reference", "tpu", "gpu" or "interpret" for an operation; KernelError for an unknown name."""
    try:
        check(implementation)
    except KernelError as error:
        raise KernelError(f"{operation}: {error}") from None
    return automatic() if implementation == "auto" else implementation


def require_device(implementation: str) -> None:
    """Refuse a kernel that this process cannot run: KernelError naming the devices there are.

    Operations do not ask, because they are also compiled ahead of time; whoever is about to run a model does.
    """
    wanted = {"tpu": ("tpu",), "gpu": ("gpu", "cuda")}.get(implementation)
    if wanted and jax.default_backend() not in wanted:
        devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
        raise KernelError(
            f"implementation={implementation!r} needs a {implementation.upper()}, and JAX sees only: {devices}. Use "
            f'"auto" or "reference" here, or install JAX for the device (pip install "dsv41-jax['
            f'{"tpu" if implementation == "tpu" else "cuda"}]")'
        )
