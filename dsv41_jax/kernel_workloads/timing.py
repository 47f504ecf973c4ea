"""Times of calls on this process's device, and the roofline they are held against."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv41_jax.kernel_workloads.workload import Workload

_ROUNDS = 3  # the best of them counts
_ROUND_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What the device does: bytes copied and bf16 FLOPs a second, and seconds of a call that computes nothing."""

    copy: float
    matmul: float
    call: float

    def bound(self, work: Workload) -> float:
        """Seconds that a workload takes at least."""
        return max(work.bytes / self.copy, work.flops / self.matmul)

    def __str__(self) -> str:
        rates = f"copy {self.copy / 1e9:.1f} GB/s, bf16 matmul {self.matmul / 1e12:.2f} TFLOP/s"
        return f"{rates}, empty call {self.call * 1e6:.0f} us"


def best_seconds(
    call: Callable[[Any], Any], state: Any, again: Callable[[Any, Any], Any] = lambda state, _: state
) -> float:
    """Seconds of a call that runs back to back; `again` makes the next call's arguments of these and the result."""

    def run(state: Any, count: int) -> tuple[float, Any]:
        start = time.perf_counter()
        for _ in range(count):
            out = call(state)
            state = again(state, out)
        jax.block_until_ready(out)
        return time.perf_counter() - start, state

    _, state = run(state, 1)  # compiles
    once, state = run(state, 1)
    count = max(2, min(200, round(_ROUND_SECONDS / max(once, 1e-6))))
    best = float("inf")
    for _ in range(_ROUNDS):
        seconds, state = run(state, count)
        best = min(best, seconds / count)
    return best


def roofline(tiny: bool) -> Roofline:
    """Measure the device, with arrays of 2 GiB, or `tiny` ones."""
    numbers, side = (1 << 20, 256) if tiny else (1 << 29, 8192)
    copy = best_seconds(jax.jit(lambda x: x + 1), jnp.zeros(numbers, jnp.int32))
    square = jnp.ones((side, side), jnp.bfloat16)
    matmul = best_seconds(jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32)), square)
    return Roofline(8 * numbers / copy, 2 * side**3 / matmul, best_seconds(jax.jit(lambda x: x + 1), jnp.zeros(8)))
