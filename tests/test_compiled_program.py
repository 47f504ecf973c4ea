"""Reading optimised programs: trips, kernels, collectives with their groups and bytes, moves; on texts and on programs
that were compiled for a TPU slice.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.compiled_program import CompiledProgram
from dsv41_jax.hlo_text import parse
from dsv41_jax.topologies import parse as topology

WIDTH, ROWS, TRIPS = 1024, 16, 3

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[8,128]{1,0})->bf16[8,128]{1,0}}

%moving (p: s32[64,128]) -> s32[128,64] {
  %p = s32[64,128]{1,0} parameter(0)
  ROOT %t = s32[128,64]{1,0} transpose(%p), dimensions={1,0}
}

%body (carry: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %carry = (s32[], bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %start = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[2,4], dimensions={0}, use_global_device_ids=true
  %work = bf16[8,128]{1,0} fusion(%x), kind=kLoop, calls=%other
  %attend = bf16[8,128]{1,0} custom-call(%work), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/while/body/sparse_attention/pallas_call"}, backend_config={"custom_call_config": {"body": "x = y(z) -start"}}
  %mark = s32[4]{0} custom-call(), custom_call_target="AllocateBuffer"
  %done = bf16[32,128]{1,0} all-gather-done(%start)
  %experts = bf16[8,128]{1,0} custom-call(%attend, %done), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/while/body/moe_down/pallas_call"}
  %sum = bf16[8,128]{1,0} all-reduce(%experts), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add
  ROOT %out = (s32[], bf16[8,128]{1,0}) tuple(%next, %sum)
}

%condition (carry.1: (s32[], bf16[8,128])) -> pred[] {
  %carry.1 = (s32[], bf16[8,128]{1,0}) parameter(0)
  %limit = s32[] constant(5)
  %at = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%at, %limit), direction=LT
}

ENTRY %main (a: bf16[8,128], b: s32[64,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %b = s32[64,128]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %copied = s32[] copy(%zero)
  %turned = s32[128,64]{1,0} fusion(%b), kind=kLoop, calls=%moving
  %ahead = (s32[64,128]{1,0:T(8,128)S(1)}, s32[64,128]{1,0}, u32[]) copy-start(%b)
  %there = s32[64,128]{1,0:T(8,128)S(1)} copy-done(%ahead)
  %init = (s32[], bf16[8,128]{1,0}) tuple(%copied, %a)
  %loop = (s32[], bf16[8,128]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %result = bf16[8,128]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_text():
    program = CompiledProgram(TEXT)
    [entry, body] = program.loops
    assert (entry.kernels.total(), body.trips, body.times) == (1, 5, 5)
    assert dict(body.kernels) == {"fusion": 1, "custom-call": 2, "collective": 2}
    assert dict(body.custom) == {"sparse_attention": 1, "moe_down": 1}
    assert program.kernels == 1 + 5 * 5 and program.kernels_per_reuse_layer() == 5
    gather, reduce = program.collectives
    assert (gather.kind, gather.bytes, gather.group, gather.times) == ("all-gather", 32 * 128 * 2, 4, 5)
    assert gather.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and gather.sent == gather.bytes * 3 / 4
    assert gather.overlapped == 2  # the fusion and the first kernel, not the mark
    assert (reduce.kind, reduce.bytes, reduce.groups[0], reduce.overlapped) == ("all-reduce", 2048, (0, 4), None)
    assert reduce.sent == 2 * 2048 / 2
    [move] = program.moves  # what is read ahead into the chip is none
    assert (move.operation, move.bytes, move.times) == ("fusion", 4 * 64 * 128, 1)
    assert program.large_moves(4 * 64 * 128) and not program.large_moves(4 * 64 * 128 + 1)


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("constant(5)", "constant(7)", 7),
        ("%zero = s32[] constant(0)", "%zero = s32[] constant(2)", 3),
        ("direction=LT", "direction=NE", None),
        (
            "condition=%condition, body=%body",
            'condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"9"}}',
            9,
        ),
    ],
)
def test_trips(old, new, trips):
    program = CompiledProgram(TEXT.replace(old, new))
    assert program.loops[1].trips == trips and program.loops[1].times == (trips or 0)
    assert bool(program.unknown_loops) == (trips is None)
    assert all(c.at_least == (trips is None) for c in program.collectives)


def test_a_loop_that_scores_is_no_reuse_layer():
    assert CompiledProgram(TEXT.replace("sparse_attention", "indexer_scores")).kernels_per_reuse_layer() is None
    with pytest.raises(ValueError, match="no ENTRY"):
        CompiledProgram("HloModule x")


def test_layers_with_a_loop_inside():
    """Attention in tiles: the layer is the loop around it, whose inner loop counts with its trips."""
    inner = TEXT.replace("moe_down", "sparse_attention").replace("%body", "%tiles").replace("%condition", "%fewer")
    inner = inner.split("ENTRY")[0].split("%moving")[1].split("}\n", 1)[1].replace("constant(5)", "constant(4)")
    call = "%many = (s32[], bf16[8,128]{1,0}) while(%again), condition=%fewer, body=%tiles"
    start = "%nought = s32[] constant(0)\n  %again = (s32[], bf16[8,128]{1,0}) tuple(%nought, %x)\n  " + call
    outer = TEXT.replace("sparse_attention", "other").replace(
        "%one = s32[] constant(1)", f"{start}\n  %one = s32[] constant(1)"
    )
    program = CompiledProgram(outer.replace("%body (", inner + "%body (", 1))
    assert [loop.trips for loop in program.layer_loops()] == [5]
    assert program.kernels_per_reuse_layer() == 5 + 4 * 5


def test_groups_as_lists():
    computations, _ = parse(TEXT.replace("[2,4]<=[2,4],", "{{0,2},{1,3}},"))
    [start] = [i for i in computations["body"].instructions if i.operation == "all-gather-start"]
    assert start.groups == ((0, 2), (1, 3))


@pytest.fixture(scope="module")
def compiled():
    """A program with every kind of collective, a counted loop and one that the data ends, for four chips."""
    machine = topology("v5e:2x2")
    mesh = Mesh(np.array(machine.jax_devices()).reshape(2, 2), ("data", "tensor"))

    def step(x, w):
        def body(x, i):
            gathered = jax.lax.all_gather(x, "tensor", tiled=True) @ w[i]
            home = jax.lax.all_to_all(gathered, "tensor", 0, 1, tiled=True)
            everything = jnp.tanh(jax.lax.all_gather(x, ("data", "tensor"), tiled=True)).astype(jnp.float32)
            back = jax.lax.psum_scatter(everything, ("data", "tensor"), scatter_dimension=0, tiled=True)
            return (home + back.astype(x.dtype) + jax.lax.psum(x, "data")).astype(x.dtype), None

        x, _ = jax.lax.scan(body, x, jnp.arange(TRIPS))

        def shift(state):
            return jax.lax.ppermute(state[0], "tensor", [(0, 1), (1, 0)]) * 0.5, state[1] + 1

        return jax.lax.while_loop(lambda state: state[1] < state[0].max(), shift, (x, jnp.float32(0)))[0]

    rows, columns = PartitionSpec(("data", "tensor")), PartitionSpec(None, None, "tensor")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(rows, columns), out_specs=rows, check_vma=False)
    specs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((4 * ROWS, WIDTH), rows), ((TRIPS, WIDTH, WIDTH), columns))
    ]
    lowered = jax.jit(sharded).lower(*specs)
    with warnings.catch_warnings():  # the persistent cache keeps what only a TPU could load again
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
        return lowered.compile()


def test_a_compiled_program(compiled):
    program = CompiledProgram(compiled.as_text())
    counted = [loop for loop in program.loops if loop.trips == TRIPS]
    assert len(counted) == 1 and counted[0].depth == 1
    assert len(program.unknown_loops) == 1
    block = 2 * ROWS * WIDTH  # bytes of a device's rows
    sent = {}
    for c in program.collectives:
        sent[c.kind, c.group] = sent.get((c.kind, c.group), 0) + c.times * c.sent
        assert c.at_least == (c.kind == "collective-permute")
    # The compiler may turn an all-gather into an all-reduce of zeros; as it is, these are its choices.
    assert sent == {
        ("all-gather", 2): TRIPS * block,
        ("all-to-all", 2): TRIPS * block / 2,
        ("all-gather", 4): TRIPS * 3 * block,
        ("reduce-scatter", 4): TRIPS * 3 * 2 * block,
        ("all-reduce", 2): TRIPS * block,
        ("collective-permute", 2): 0,  # nobody knows how often
    }
    assert 5 * TRIPS < program.kernels < 20 * TRIPS
    overlapped = [c for c in program.collectives if c.overlapped]
    assert overlapped and all(c.kind in ("all-gather", "collective-permute") for c in overlapped)
