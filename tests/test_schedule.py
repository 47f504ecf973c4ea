"""Reading the TPU compiler's schedule: nesting, bundles, trip counts; and a real dump, in a process of its own."""

import subprocess
import sys

import pytest

from pallas_kernels import schedule

DUMP = """\
= control target key start
LB: loop body

     0   :  { %s1 = smov 0  ;;  %v2 = vmov 3 }
   0x1   :  { %s2 = smov 0 }
   0x2 LB: > { %s3 = sphi %s1, %s5 /* phi copy */  ;;  %s8 = sphi %s1, %s7 }
   0x3   : > { %7 = dma.hbm_to_vmem [thread:$0]  %s1 }
   0x4   :  {}
   0x5 LB: >> { %v4 = vadd.s32 %v2, %v2 }
   0x6   : >> { %p1 = scmp.ge.s32.totalorder %s4, 32 /* loop exit test */  ;;  %v5 = vmatpush.bf16.msra.mxu0 %v4 }
   0x7   : >> { %p2 = scmp.ge.s32.totalorder (%p1), %s5, 6 /* loop exit test */ }
   0x8 LE: > { %27 = sbr.rel (!%p2) target = $region1 }
   0x9   :  { %s6 = smov 1 }
   0xa LB: > { %v6 = vadd.s32 %v2, %v2 }
"""


def test_nesting_and_counts():
    program = schedule.parse("kernel", DUMP)
    assert (program.straight, program.size) == (3, 11)
    outer, last = program.loops
    assert (outer.own, outer.trips, outer.dmas, outer.matmuls) == (4, 6, 1, 0)
    [inner] = outer.inner
    assert (inner.own, inner.trips, inner.matmuls) == (3, 32, 1)  # the outer loop's test stands in the inner one
    assert outer.bundles() == 4 + 32 * 3
    assert program.bundles({1: 2}) == 3 + 2 * (4 + 32 * 3) + 2 * 1
    assert outer.bundles({2: 10}) == 4 + 10 * 3
    assert (last.own, last.trips) == (1, None)


def test_a_loop_whose_trips_are_unknown_needs_them():
    program = schedule.parse("kernel", DUMP.replace("32 /* loop exit test */", "%s8"))
    with pytest.raises(ValueError, match="how often the loop at depth 2 runs"):
        program.loops[0].bundles()
    assert program.loops[0].bundles({2: 4}) == 4 + 4 * 3


SCRIPT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from dsv41_jax.aot import compile_for
from pallas_kernels import schedule
folder = Path(sys.argv[1])
schedule.dump_to(folder)
def double(x, out):
    out[...] = x[...] * 2
def fn(x):
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(double, grid=(32,), in_specs=[block], out_specs=block, out_shape=x, name="double")(x)
compile_for("v5e", fn, jax.ShapeDtypeStruct((256, 128), jnp.float32))
programs = schedule.take(folder)
assert not list(folder.iterdir())
[kernel] = [p for p in programs if p.name.startswith("double")]
assert kernel.loops[0].trips == 32 + 2 and 5 < kernel.loops[0].bundles() < 200, kernel
try:
    schedule.dump_to(folder)
except RuntimeError as error:
    print(error)
"""


def test_a_real_schedule(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "dump"], capture_output=True, text=True, check=True)
    assert "libtpu is loaded already" in done.stdout
