"""Step times of compiled programs: small schedules as XLA:TPU writes them, with sums that are
worked out by hand.

In a nanosecond the chip of these tests does one cycle, one flop and one byte of memory, all of its
bandwidth. It sends one byte over the links of an axis of its torus, and a tenth of a byte between slices. So cycles and
bytes are nanoseconds. An all-gather of f32[8000] over 8 devices sends 7/8 x 32,000 = 28,000 bytes:
28,000 ns over one axis of the torus, 14,000 over both."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support.paths import ROOT
from support.scripts import imported

import shardopt as so
from shardopt.hlo import audit
from shardopt.kernels._norm import gradient_of_norm, inverse_rms
from shardopt.kernels._rotary import rotate_halves
from shardopt.planning import HARDWARE, Hardware

with imported("step_times") as step_times:
    CompiledOperation = step_times.CompiledOperation
    StepSeconds = step_times.StepSeconds
    step_seconds = step_times.step_seconds
    hardware_of = step_times._compiled_time.hardware_of
    SCHEDULED = step_times._attention_kernels.SCHEDULED
    MEMORY_SHARES = step_times._vector_work.MEMORY_SHARES
    ERROR_BARS = step_times._vector_work.ERROR_BARS
    HOST_BANDWIDTHS = step_times._links.HOST_BANDWIDTHS
    VECTOR_KERNELS = step_times._vector_work.KERNELS

pytestmark = pytest.mark.fast

CHIP = Hardware(
    "t",
    1e9,
    10**9,
    1e9,
    1e9,
    torus_dims=2,
    pod_chips=64,
    network_bandwidth=1e8,
    source="",
    clock=1e9,
)
MESH = {"data": 8}
ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, dimensions={0}"


def work(name, cycles, shape="f32[1000]{0}", inputs="%p"):
    """Return a product, which takes the cycles that XLA estimates."""
    return (
        f"%{name} = {shape} fusion({inputs}), kind=kOutput, calls=%product,"
        f' backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def gather(name, inputs="%p", groups=ALL, config="", opcode="all-gather", shape="f32[8000]{0}"):
    return f"%{name} = {shape} {opcode}({inputs}), {groups}{config}"


def emitter(name, strategy=""):
    return f', backend_config={{"collective_algorithm_config":{{"emitter":"{name}","debug":"{strategy}"}}}}'


def program(*lines, computations="", partitions=8, tables=""):
    return (
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n{tables}"
        "%fused (a: f32[1000]) -> f32[1000] {\n  ROOT %a = f32[1000]{0} parameter(0)\n}\n"
        "%product (a: f32[1000]) -> f32[1000] {\n  %a = f32[1000]{0} parameter(0)\n"
        "  ROOT %c = f32[1000]{0} dot(%a, %a)\n}\n"
        f"{computations}\n"
        "ENTRY %main (p: f32[1000]) -> f32[1000] {\n  %p = f32[1000]{0} parameter(0)\n"
        + "".join(f"  {line}\n" for line in lines)
        + "  ROOT %out = f32[1000]{0} bitcast(%p)\n}\n"
    )


def seconds(*lines, mesh=MESH, **options):
    return step_seconds(program(*lines, **options), mesh=mesh, hardware=CHIP, memory_share=1)


def sums(step):
    """Return total, compute, exposed and hidden in nanoseconds."""
    assert step.total == step.compute + step.exposed
    return [
        round(duration * 1e9, 3)
        for duration in (step.total, step.compute, step.exposed, step.hidden)
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", 14_000),  # nothing told: 8 of 8 devices have both axes of the torus
        (emitter("1DAllGatherOnMajorDim"), 28_000),
        (emitter("2DAllGatherNonMajorDim"), 14_000),
        (emitter("3DAllGatherNonMajorDim"), 14_000),  # this torus has two
        (
            emitter(
                "RotatedPincerEmitter", "UniDirection1DRingStrategy{colors:2 phases:1 cores:{8},{8}"
            ),
            28_000,
        ),
        (
            emitter("RotatedPincerShortEmitter", "StrategyND{colors:2 phases:2 cores:{4 2},{2 4}"),
            14_000,
        ),
        (emitter("SinglePhaseRingSumEmitter"), 28_000),
    ],
    ids=["nothing", "1D", "2D", "3D", "ring", "two rings", "ring sum"],
)
def test_the_tensorcore_waits_for_a_synchronous_collective(config, expected):
    step = seconds(work("a", 10_000), gather("g", config=config), work("b", 5_000))
    assert sums(step) == [15_000 + expected, 15_000, expected, 0]
    assert [
        (span.where, round(span.start * 1e9), round(span.end * 1e9)) for span in step.spans
    ] == [
        ("compute", 0, 10_000),
        ("exposed", 10_000, 10_000 + expected),
        ("data", 10_000, 10_000 + expected),
        ("compute", 10_000 + expected, 15_000 + expected),
    ]


SPARSE_CORE = f"""
%called (q: f32[1000]) -> f32[8000] {{
  %q = f32[1000]{{0}} parameter(0)
  ROOT {gather("inner", "%q")}
}}, execution_thread="sparsecore"
"""
STARTS = (
    '%s = ((), (), (s32[8]{0})) custom-call-start(), async_execution_thread="sparsecore",'
    " called_computations={%called}"
)
UPDATES = "%u = ((f32[1000]{0}), f32[8000]{0}, (s32[8]{0})) custom-call-update(%s, %a)"
ENDS = "%d = f32[8000]{0} custom-call-done(%u)"


@pytest.mark.parametrize(
    ("beside", "expected"),
    # the update at 10,000 brings the data, so it is sent from then on until 24,000
    [(20_000, [30_000, 30_000, 0, 14_000]), (5_000, [24_000, 15_000, 9_000, 5_000])],
    ids=["hidden", "partly"],
)
def test_the_sparse_core_sends_beside_the_tensorcore(beside, expected):
    lines = [STARTS, work("a", 10_000), UPDATES, work("b", beside), ENDS]
    step = seconds(*lines, computations=SPARSE_CORE)
    assert sums(step) == expected
    collectives = audit(program(*lines, computations=SPARSE_CORE), mesh=MESH).collectives
    assert [(collective.asynchronous, collective.wire_bytes) for collective in collectives] == [
        (True, 28_000)
    ]


def both(mesh_axes):
    """Two gathers that start at once, 20,000 of work, and their ends."""
    lines = [
        gather(
            f"s{at}", groups=groups, opcode="all-gather-start", shape="(f32[1000]{0}, f32[8000]{0})"
        )
        for at, groups in enumerate(mesh_axes)
    ]
    ends = [f"%d{at} = f32[8000]{{0}} all-gather-done(%s{at})" for at in range(len(mesh_axes))]
    return [*lines, work("a", 20_000), *ends]


def test_transfers_over_one_mesh_axis_share_its_links():
    # 14,000 each alone: at half of the speed both end at 28,000
    step = seconds(*both([ALL, ALL]))
    assert sums(step) == [28_000, 20_000, 8_000, 20_000]
    ends = [round(span.end * 1e9) for span in step.spans if span.where == "data"]
    assert ends == [28_000, 28_000]


def test_a_short_transfer_does_not_wait_until_a_long_one_ends():
    # 140 alone: from 0 to 280. The long one loses 140, so it ends at 14,140.
    long = gather("s", opcode="all-gather-start", shape="(f32[1000]{0}, f32[8000]{0})")
    short = gather("g", shape="f32[80]{0}")
    end = "%d = f32[8000]{0} all-gather-done(%s)"
    assert sums(seconds(long, short, work("a", 20_000), end)) == [20_280, 20_000, 280, 13_860]
    assert sums(seconds(long, short, work("a", 5_000), end)) == [14_140, 5_000, 9_140, 5_000]


def test_transfers_over_different_mesh_axes_do_not_meet():
    # an axis of the torus each: 3/4 x 32,000 = 24,000 over data, 1/2 x 32,000 = 16,000 over tensor
    data = ALL.replace("[1,8]<=[8]", "[2,4]<=[4,2]T(1,0)")
    tensor = ALL.replace("[1,8]<=[8]", "[4,2]<=[8]")
    step = seconds(*both([data, tensor]), mesh={"data": 4, "tensor": 2})
    assert sums(step) == [24_000, 20_000, 4_000, 36_000]
    assert {span.where for span in step.spans} == {"compute", "exposed", "data", "tensor"}


def test_a_synchronous_collective_shares_links_with_the_one_under_way():
    # 4,000 of the first are left at 10,000: both share until 18,000. The second ends at 28,000.
    start = gather("s", opcode="all-gather-start", shape="(f32[1000]{0}, f32[8000]{0})")
    step = seconds(start, work("a", 10_000), gather("g"), "%d = f32[8000]{0} all-gather-done(%s)")
    assert sums(step) == [28_000, 10_000, 18_000, 10_000]


LOOP = """
%body (x: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %x = (s32[], f32[1000]{{0}}) parameter(0)
  {lines}
  ROOT %y = (s32[], f32[1000]{{0}}) tuple(%x)
}}

%condition (x: (s32[], f32[1000])) -> pred[] {{
  ROOT %z = pred[] parameter(0)
}}
"""
TURNS = ', backend_config={"known_trip_count":{"n":"3"}}'


def loop(turns=TURNS):
    return f"%w = (s32[], f32[1000]{{0}}) while(%p), condition=%condition, body=%body{turns}"


def test_a_loop_counts_as_often_as_it_turns():
    # 3 x (10,000 + 14,000)
    body = "\n  ".join([work("a", 10_000, inputs="%x"), gather("g", "%a")])
    step = seconds(loop(), computations=LOOP.format(lines=body))
    assert sums(step) == [72_000, 30_000, 42_000, 0]
    assert [
        (operation.name, operation.calls, operation.waits) for operation in step.operations
    ] == [
        ("all-gather g", 3, True),
        ("a", 3, False),
    ]
    assert len(step.spans) == 3 * 3


def test_a_loop_without_collectives_is_not_walked_again_and_again():
    step = seconds(loop(), computations=LOOP.format(lines=work("a", 10_000, inputs="%x")))
    assert sums(step) == [30_000, 30_000, 0, 0]
    assert [(operation.calls, operation.seconds) for operation in step.operations] == [
        (3, pytest.approx(30e-6))
    ]
    assert len(step.spans) == 1


def test_a_loop_that_does_not_tell_counts_once_and_is_named():
    step = seconds(loop(turns=""), computations=LOOP.format(lines=work("a", 10_000, inputs="%x")))
    assert sums(step) == [10_000, 10_000, 0, 0]
    assert step.notes == ("assumed: 1 x loops that do not tell how often they turn, counted once",)


def test_what_nobody_waits_for_has_to_arrive_all_the_same():
    start = gather("s", opcode="all-gather-start", shape="(f32[1000]{0}, f32[8000]{0})")
    assert sums(seconds(start, work("a", 10_000))) == [14_000, 10_000, 4_000, 10_000]


def piece(name, config):
    line = (
        f'ROOT {gather("in_" + name, "%q")}, frontend_attributes={{chain_id="7"}},'
        f" backend_config={config}"
    )
    return (
        f"\n%{name} (q: f32[1000]) -> f32[8000] {{\n  %q = f32[1000]{{0}} parameter(0)\n "
        f" {line}\n}}\n"
    )


def test_a_collective_that_is_spread_over_fusions_runs_from_the_first_to_the_last():
    # in a ring, so over one axis: 28,000 from the start; 10,000 + 2,000 at the same time
    config = '{"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}'
    definitions = "".join(piece(name, config) for name in ("first", "middle", "last"))
    step = seconds(
        "%start = (f32[8000]{0}) fusion(%p), kind=kCustom, calls=%first",
        work("m", 10_000).replace("%product", "%middle"),
        work("b", 2_000),
        "%done = f32[8000]{0} fusion(%m), kind=kCustom, calls=%last",
        work("c", 1_000),
        computations=definitions,
    )
    assert sums(step) == [29_000, 13_000, 16_000, 12_000]


def test_the_slowest_branch_counts():
    branches = "".join(
        f"\n%{name} (q: f32[1000]) -> f32[1000] {{\n  %q = f32[1000]{{0}} parameter(0)\n  ROOT"
        f" {line}\n}}\n"
        for name, line in (("one", work("a", 9_000, inputs="%q")), ("two", gather("g", "%q")))
    )
    # 14,000 of a collective is more than 9,000 of work
    chosen = "%c = f32[1000]{0} conditional(%p, %p, %p), branch_computations={%one, %two}"
    assert sums(seconds(chosen, computations=branches)) == [14_000, 0, 14_000, 0]


def test_a_pass_of_a_pipeline_counts_in_the_ticks_in_which_some_stage_takes_it():
    """gpipe on 2 stages with 3 micro-batches has forwards in 4 of 8 ticks, backwards in the other
    4.

    All ticks have permutes.
    """
    schedule = so.schedules.gpipe(2, 3)
    assert schedule.num_ticks == 8
    passes = "".join(
        f"\n%{name} (q: f32[1000]) -> f32[1000] {{\n  %q = f32[1000]{{0}} parameter(0)\n  ROOT"
        f" {line}\n}}\n"
        for name, line in (
            ("forward", work("f", 1_000, inputs="%q")),
            ("backward", work("b", 2_000, inputs="%q")),
            ("idle", "%i = f32[1000]{0} bitcast(%q)"),
        )
    )
    taken = "%c{} = f32[1000]{{0}} conditional(%x, %x, %x), branch_computations={{%idle, %{}}}"
    pairs = "channel_id=1, source_target_pairs={{0,1},{2,3}}"
    lines = [taken.format(1, "forward"), taken.format(2, "backward")]
    # 4,000 bytes to a neighbour over the axis of the torus that 2 of 4 devices have
    lines.append(f"%g = f32[1000]{{0}} collective-permute(%x), {pairs}")
    turns = TURNS.replace("3", "8")
    options = {
        "mesh": {"data": 2, "pipeline": 2},
        "partitions": 4,
        "computations": passes + LOOP.format(lines="\n  ".join(lines)),
    }
    assert sums(seconds(loop(turns), **options)) == [8 * 7_000, 8 * 3_000, 8 * 4_000, 0]
    step = step_seconds(
        program(loop(turns), partitions=4, computations=options["computations"]),
        mesh=options["mesh"],
        hardware=CHIP,
        schedule=schedule,
        memory_share=1,
    )
    assert sums(step) == [4 * 3_000 + 8 * 4_000, 4 * 3_000, 8 * 4_000, 0]
    with pytest.raises(
        ValueError,
        match=(
            r"^step_seconds: the schedule has 12 ticks, and no loop of the program turns so often"
        ),
    ):
        step_seconds(
            program(loop(turns), partitions=4, computations=options["computations"]),
            mesh=options["mesh"],
            hardware=CHIP,
            schedule=so.schedules.gpipe(2, 5),
            memory_share=1,
        )


def test_a_called_computation_runs_in_place():
    called = (
        "\n%callee (q: f32[1000]) -> f32[1000] {\n  %q = f32[1000]{0} parameter(0)\n  ROOT"
        f" {work('a', 9_000)}\n}}\n"
    )
    step = seconds(
        "%c = f32[1000]{0} call(%p), to_apply=%callee", work("b", 1_000), computations=called
    )
    assert sums(step) == [10_000, 10_000, 0, 0]


def test_the_network_carries_bytes_between_slices():
    # an all-reduce of 4,000 bytes over 2 slices: 2 x 1/2 x 4,000 at a tenth of a byte, 40,000; work
    # hides 10,000
    words = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="r"'
    )
    attributes = (
        "channel_id=2, is_host_transfer=true,"
        f' frontend_attributes={{{words},_xla_megascale_transfer_type="ALL_REDUCE"}}'
    )
    step = seconds(
        f"%send = (f32[1000]{{0}}, u32[]{{:S(2)}}, token[]) send(%p), {attributes}",
        f"%recv = (f32[1000]{{0}}, u32[]{{:S(2)}}, token[]) recv(%p), {attributes}",
        work("a", 10_000),
        "%recv-done = (f32[1000]{0}, token[]) recv-done(%recv), channel_id=1",
        work("b", 1_000),
        "%send-done = token[] send-done(%send), channel_id=2",
        mesh={"replica": 2, "data": 8},
    )
    assert sums(step) == [41_000, 11_000, 30_000, 10_000]


def test_an_all_to_all_passes_devices_in_between():
    # 64 devices on 8 x 8: 63/64 x 64,000 bytes over both axes, past 8 / 4 = 2 links on average
    groups = "channel_id=1, replica_groups=[1,64]<=[64], dimensions={0}"
    line = gather("g", groups=groups, opcode="all-to-all", shape="f32[16000]{0}")
    step = seconds(work("a", 0), line, partitions=64, mesh={"expert": 64})
    assert sums(step)[2] == 2 * 63_000 / 2


def kernel(name, config=""):
    inputs = "%p, %q"
    shape = "bf16[8,1024,128]{2,1,0}"
    q = f"%q = {shape} bitcast(%p)"
    return [
        q,
        f'%{name}.3 = {shape} custom-call({inputs}), custom_call_target="tpu_custom_call"{config}',
        work("a", 1),
    ]


def test_kernels_take_what_they_state_or_what_their_shapes_tell():
    stated = ', backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"5000000","bytes_accessed":"7"}}}'
    assert sums(seconds(*kernel("mine", stated))) == [5_000_001, 5_000_001, 0, 0]
    few_flops = stated.replace("5000000", "5000")
    assert sums(seconds(*kernel("mine", few_flops)))[0] == BYTES_OF_A_KERNEL + 1
    # Two products run over 8 heads of 1024 x 1024 x 128. Three quarters of them count: 3 of 4
    # blocks of 512 x 512 are not masked.
    flops = 2 * 2 * 8 * 1024**2 * 128 * 3 / 4
    assert sums(seconds(*kernel("splash_mha_fwd")))[0] == flops + 1
    assert seconds(*kernel("splash_mha_fwd")).notes == ()
    other = seconds(*kernel("mine"))
    assert sums(other)[0] == BYTES_OF_A_KERNEL + 1
    assert other.notes == ("assumed: 1 x kernel mine, whose arithmetic is not known",)


BYTES_OF_A_KERNEL = 4000 + 2 * 8 * 1024 * 128 * 2
"""Of its two inputs and its result."""


def attention(name, results, inputs, config=""):
    """A kernel of attention, with its inputs as parameters of their shapes."""
    lines = [f"%i{at} = {shape} bitcast(%p)" for at, shape in enumerate(inputs)]
    operands = ", ".join(f"{'/*index=5*/' if at == 5 else ''}%i{at}" for at in range(len(inputs)))
    call = (
        f"%{name}.1 = {results} custom-call({operands}),"
        f' custom_call_target="tpu_custom_call"{config}'
    )
    return [*lines, call, work("a", 0)]


SEGMENTED = "splash_backward_4_segmented"


def backward_kernel(groups, rows=1, heads=32, length=4096, segments=()):
    query = f"bf16[{rows},{heads},{length},128]"
    key = f"bf16[{rows},{groups},{length},128]"
    number = f"f32[{rows},{heads},1,{length}]"
    tiles = (length // 512) * (length // 512 + 1) // 2
    inputs = [f"s32[{tiles}]", f"s32[{tiles}]", query, query, number, number, key, key, *segments]
    stated = ', backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"229500000000"}}}'
    return attention("transpose_jvp_splash_backward__", f"({query}, {key}, {key})", inputs, stated)


def our_forward_kernel(groups=8, heads=32, length=4096, flops=None):
    query = f"bf16[1,{heads},{length},128]"
    key = f"bf16[1,{groups},{length},128]"
    blocks = length // 512
    flops = flops or 2 * 512**2 * blocks * (blocks + 1) // 2 * heads * 256
    stated = f', backend_config={{"custom_call_config":{{"body":"x","cost_estimate":{{"flops":"{flops}"}}}}}}'
    return attention(
        "jvp_splash_forward_", f"({query}, f32[1,{heads},1,{length}])", [query, key, key], stated
    )


def forward_kernel(block, heads=32, length=4096, segments=""):
    table = f"s8[1,{length // block},{length // block}]"
    query = f"bf16[{heads},{length},128]"
    sizes = f'{{\\"block_q\\": {block}, \\"block_kv\\": {block}}}'
    metadata = (
        f', frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{sizes}"\n}}}},'
        ' metadata={op_name="x"}'
    )
    inputs = [table, table, query, query, query, f"s32[{length},128]"]
    return attention(
        f"splash_mha_fwd{segments}_residuals",
        f"({query}, f32[{heads},{length},128])",
        inputs,
        metadata,
    )


def milliseconds(lines, chip, **options):
    step = step_seconds(program(*lines), mesh=MESH, hardware=chip, **options)
    (operation,) = step.operations
    assert f"{operation.name} ({operation.basis})" in str(step)
    return operation.basis, pytest.approx(step.total * 1e3)


def test_a_larger_block_than_known_takes_the_bundles_of_its_numbers():
    step, tile, row = SCHEDULED["v6e", "fwd", 1024, 128]
    cycles = 32 * (4 * step + 3 * 4 * tile + 2 * 2 * row)  # 4,096 positions are two blocks of 2,048
    basis = milliseconds(forward_kernel(2048), "v6e")
    assert basis == ("scheduled", cycles / 1.75e6)
    known = milliseconds(forward_kernel(1024), "v6e")[1].expected
    assert 1 < basis[1].expected / known < 1.2  # more of the square is in tiles of the diagonal


def test_known_attention_kernels_take_their_final_schedule():
    def of_heads(tile, row, heads=32):
        return heads * (36 * tile + 8 * row) / 1.75e6  # visible tiles, and blocks of rows

    assert milliseconds(backward_kernel(groups=8), "v5p") == (
        "scheduled",
        of_heads(2439.75, 144.46875) / 2,
    )  # two cores
    assert milliseconds(backward_kernel(groups=8), "v6e") == (
        "scheduled",
        of_heads(1578.5, 84.46875),
    )
    # two heads a step
    assert milliseconds(backward_kernel(groups=16), "v6e") == ("scheduled", of_heads(1718, 84.875))
    segmented = backward_kernel(groups=8, segments=["s32[1,1,4096]", "s32[1,4096,128]"])
    assert milliseconds(segmented, "v6e") == (
        "scheduled",
        of_heads(*SCHEDULED["v6e", SEGMENTED, 512, 128][::2]),
    )
    assert milliseconds(our_forward_kernel(), "v5p") == ("scheduled", of_heads(1009, 391) / 2)
    assert milliseconds(our_forward_kernel(), "v6e") == ("scheduled", of_heads(644, 219))
    # four heads of one row are two steps of two heads, one on each core
    assert milliseconds(our_forward_kernel(groups=1, heads=4), "v5p") == (
        "scheduled",
        of_heads(1004.5, 360, 4) / 2,
    )
    # jax visits all tiles, and computes the visible ones
    forward = 32 * (64 * 319 + 36 * 1199 + 8 * 507)
    assert milliseconds(forward_kernel(512), "v5p") == ("scheduled", forward / 2 / 1.75e6)
    forward = 32 * (16 * 312 + 10 * 4846 + 4 * 995)
    assert milliseconds(forward_kernel(1024), "v5p") == ("scheduled", forward / 2 / 1.75e6)


def test_the_fused_backward_kernel_of_jax_shares_rows_among_cores():
    query = "bf16[4,32,4096,128]"
    key = "bf16[4,8,4096,128]"
    table = "s8[1,4,4]"
    metadata = (
        ', frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q_dkv\\":'
        ' 1024}"\n}}, metadata={op_name="x"}'
    )
    results = f"(bf16[4,4,32,4096,128], {key}, {key})"
    lines = attention(
        "splash_mha_dkv_segmented_no_residuals", results, [table, table, query, key, key], metadata
    )
    # five in each of ten visible tiles, at the peak of both cores
    products = 4 * 32 * 10 * 5 * 2 * 1024**2 * 128
    assert milliseconds(lines, "v5p") == ("scheduled", products / 459e9)
    assert milliseconds(lines, "v6e") == (
        "scheduled",
        4 * 32 * (16 * 246 + 10 * 6046 + 4 * 59.5) / 1.75e6,
    )


def test_one_group_of_heads_uses_one_of_two_cores():
    shared, alone = (milliseconds(backward_kernel(groups=groups), "v5p") for groups in (8, 1))
    assert (alone[0], alone[1].expected) == ("scheduled", pytest.approx(2 * shared[1].expected))
    # of three groups one core has two
    three = milliseconds(backward_kernel(groups=3, heads=24), "v5p")[1].expected
    assert three == pytest.approx(24 / 32 * 4 / 3 * shared[1].expected)
    narrow = [
        [line.replace("128]", "64]") for line in backward_kernel(groups=groups)]
        for groups in (8, 1)
    ]
    assert [milliseconds(lines, "v5p") for lines in narrow] == [("stated", 0.5), ("stated", 1.0)]
    assert milliseconds(backward_kernel(groups=1), "v5p", kernels="stated") == ("stated", 0.5)
    assert milliseconds(backward_kernel(groups=1), "v6e", kernels="stated") == ("stated", 0.25)


def grouped_product(kind, columns=300):
    """Return the kernel that jax lowers for 1,024 rows in 4 groups and tiles of 512 x 256 x 256."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    def run(rows, other, sizes):
        if kind == "gmm":
            return gmm(rows, other, sizes, jnp.bfloat16, (512, 256, 256))
        return tgmm(rows.swapaxes(0, 1), other, sizes, jnp.bfloat16, (512, 256, 256))

    shapes = [(1024, 300), (4, 300, columns) if kind == "gmm" else (1024, columns)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = jax.jit(run).trace(*arguments, sizes).lower(lowering_platforms=("tpu",)).as_text()
    (config,) = re.findall(r'tpu_custom_call.*?backend_config = "(.*?)", kernel_name', lowered)
    text = re.sub(r"\s|\\0A", "", config.replace("\\22", '"'))
    tables = ["s32[]", "s32[5]", "s32[5]", "s32[5]", "s32[1]"]
    dims = [",".join(map(str, shape)) for shape in shapes]
    result = f"bf16[1024,{columns}]" if kind == "gmm" else f"bf16[4,300,{columns}]"
    inputs = [*tables, *(f"bf16[{sizes}]" for sizes in dims)]
    return attention(kind, result, inputs, f", backend_config={text}")


@pytest.mark.parametrize("kind", ["gmm", "tgmm"])
def test_a_grouped_product_takes_the_tiles_that_it_visits(kind):
    """Two tiles of rows in four groups are five visits. 300 columns are two tiles of 256."""
    step = seconds(*grouped_product(kind))
    assert [(operation.name, operation.basis) for operation in step.operations] == [
        (f"{kind}.1", "tiles")
    ]
    assert sums(step)[0] == 2 * 5 * 512 * 512 * 512 > 2 * 1024 * 300 * 300
    slow_memory = dataclasses.replace(CHIP, memory_bandwidth=1e6)
    text = program(*grouped_product(kind))
    by_bytes = step_seconds(text, mesh=MESH, hardware=slow_memory, memory_share=1)
    other, result = (256 * 256, 1024 * 300) if kind == "gmm" else (512 * 256, 4 * 300 * 300)
    loaded = 5 * 2 * 2 * (512 * 256 + other) + result
    assert sums(by_bytes)[0] == pytest.approx(2 * loaded * 1e3)
    # a core cannot help with one tile of columns
    two_cores = dataclasses.replace(CHIP, cores=2)
    narrow = program(*grouped_product(kind, columns=200))
    for other in (text, narrow):
        shared = step_seconds(other, mesh=MESH, hardware=two_cores, memory_share=1)
        assert sums(shared)[0] == sums(step)[0]


def test_kernels_of_int8_state_flops_at_the_peak_of_int8_where_a_chip_has_one():
    stated = ', backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"918000000000"}}}'
    lines = [*kernel("int8_forward", stated)[:2], work("a", 0)]
    times = {chip: milliseconds(lines, chip) for chip in ("v6e", "v4")}
    assert times == {
        "v6e": ("stated", pytest.approx(0.5)),
        "v4": ("stated", pytest.approx(918 / 275)),
    }


@pytest.mark.parametrize(
    "lines",
    [
        [line.replace("bf16", "f32") for line in backward_kernel(groups=8)],
        [line.replace("s32[36]", "s32[64]") for line in backward_kernel(groups=8)],  # not causal
        [line.replace("128]", "64]") for line in backward_kernel(groups=8)],  # heads of 64
        our_forward_kernel(flops=2 * 512**2 * 64 * 32 * 256),  # not causal
        our_forward_kernel(length=4096 + 128, flops=10**9),  # blocks of 128
    ],
    ids=["dtype", "tiles", "width", "all tiles", "blocks"],
)
def test_other_attention_kernels_take_what_they_state(lines):
    assert milliseconds(lines, "v5p")[0] == "stated"


def test_kernels_is_one_of_two_words():
    with pytest.raises(
        ValueError, match=r"^step_seconds: kernels must be 'scheduled' or 'stated', got 'fast'\."
    ):
        step_seconds(program(), mesh=MESH, hardware=CHIP, kernels="fast")


def product_before_code(dtype):
    """Return a product of 512 x 512 numbers without an estimate, in its own computation."""
    square = f"{dtype}[512,512]{{1,0:T(8,128)}}"
    computation = (
        f"%multiply (a: {square}) -> {square} {{\n  %a = {square} parameter(0)\n"
        f"  ROOT %c = {square} convolution(%a, %a), dim_labels=bf_io->bf\n}}\n"
    )
    line = f"%dot = {square} fusion(%x), kind=kOutput, calls=%multiply"
    return f"%x = {square} copy-done(%p)", line, computation


def test_a_product_before_code_generation_takes_its_flops_at_the_peak():
    chip = dataclasses.replace(CHIP, name="v5e", memory_bandwidth=1e15)
    for dtype, flops in (("bf16", 1e9), ("s8", 2e9)):
        source, line, computation = product_before_code(dtype)
        text = program(source, line, computations=computation)
        assert "estimated_cycles" not in text
        step = step_seconds(text, mesh=MESH, hardware=chip)
        assert step.total == pytest.approx(2 * 512**3 / flops, rel=1e-3)
        assert step.notes[-1].startswith("assumed: 1 x product without an estimate, counted by its")


def test_what_has_no_product_takes_its_bytes():
    unknown = f'"estimated_cycles":"{2**63 - 1}"'
    step = seconds(
        work("a", 1_000),
        "%custom = f32[2000]{0} fusion(%a), kind=kCustom, calls=%fused",  # 4,000 + 8,000 bytes
        "%loop = f32[1000]{0} fusion(%a), kind=kLoop, calls=%fused,"
        ' backend_config={"estimated_cycles":"1"}',  # 4,000 + 4,000
        # 4,000 + 8,000, since the product has no estimate
        f"%dot.7 = f32[2000]{{0}} fusion(%a), calls=%product, backend_config={{{unknown}}}",
        "%in_vmem = f32[1000]{0:T(1024)S(1)} copy(%a)",  # it is read from HBM: 4,000
        '%buffer = f32[100000]{0} custom-call(), custom_call_target="AllocateBuffer"',
    )
    assert sums(step) == [37_000, 37_000, 0, 0]
    assert step.notes == (
        "assumed: 1 x product without an estimate, counted by its flops at the peak or its bytes",
    )


PROGRAMS = ROOT / "tests" / "rooms" / "hlo" / "programs"


def seconds_of_operations(chip, **options):
    """Return the seconds of each operation of a program that XLA:TPU compiled (programs/make.py)."""
    text = (PROGRAMS / f"{chip}_memory_bound.hlo").read_text()
    step = step_seconds(text, mesh={"data": 4}, hardware=chip, **options)
    return {operation.name: operation.seconds for operation in step.operations}


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_a_copy_of_bfloat16_takes_half_of_the_time_of_float32(chip):
    """XLA estimates the same cycles for both."""
    seconds = seconds_of_operations(chip)
    assert seconds["copy.11"] == pytest.approx(2 * seconds["copy.10"])
    moved = 2 * 4096 * 8192 * 2
    bandwidth = MEMORY_SHARES[chip] * HARDWARE[chip].memory_bandwidth
    assert seconds["copy.10"] == pytest.approx(moved / bandwidth)
    assert seconds_of_operations(chip, memory_share=1.0)["copy.10"] == pytest.approx(
        moved / HARDWARE[chip].memory_bandwidth
    )


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_a_fusion_takes_the_same_as_a_kernel(chip):
    """On v6e XLA copies the input of the kernel into VMEM while a fusion needs all of the bandwidth.
    So the step waits for the copy.
    """
    seconds = seconds_of_operations(chip)
    of_kernel = seconds["scaled_by_kernel.1"] + seconds.get("copy-start", 0.0)
    assert of_kernel == pytest.approx(seconds["add_convert_fusion"])
    assert ("copy-start" in seconds) == (chip == "v6e")


def copied(*between):
    """A copy of 4,000 bytes into VMEM, with operations between its start and its end."""
    shapes = "(f32[1000]{0:T(1024)S(1)}, f32[1000]{0}, u32[]{:S(2)})"
    return [
        f"%s = {shapes} copy-start(%p)",
        *between,
        "%d = f32[1000]{0:T(1024)S(1)} copy-done(%s)",
        "%used = f32[1000]{0:T(1024)S(1)} copy(%d)",
    ]


def test_a_copy_into_vmem_takes_the_bandwidth_that_operations_leave():
    # 4,000 for the HBM, in whole tiles of 1024 numbers on its other end: 4,096
    assert sums(seconds(*copied(work("a", 0)))) == [4_096, 4_096, 0, 0]
    # a product of 10,000 reads and writes 8,000 bytes itself
    assert sums(seconds(*copied(work("a", 10_000)))) == [12_096, 12_096, 0, 0]
    assert sums(seconds(*copied(work("a", 13_000)))) == [13_000, 13_000, 0, 0]
    other_copy = "%n = f32[1000]{0} copy(%p)"
    assert sums(seconds(*copied(other_copy, work("a", 0)))) == [12_096, 12_096, 0, 0]
    # while it waits for other devices the HBM is idle
    assert sums(seconds(*copied(work("a", 0), gather("g")))) == [14_000, 0, 14_000, 0]
    # each turn of a loop has its own copy; its product reads a tuple of 4,004 bytes
    body = "\n  ".join(line.replace("%p", "%x") for line in copied(work("a", 10_000)))
    assert sums(seconds(loop(), computations=LOOP.format(lines=body)))[0] == 3 * 12_100


def host_copy(opcode, *between):
    """Return a copy to the host or from it, in a loop of three turns, and its operations."""
    on_chip, on_host = "f32[1000]{0}", "f32[1000]{0:S(5)}"
    stack = "f32[3,1000]{1,0:S(5)}"
    shapes = {
        "copy": f"({on_host}, {on_chip}, u32[]{{:S(2)}})",
        "dynamic-slice": f"(({stack}, s32[]), {on_chip}, u32[]{{:S(2)}})",
        "dynamic-update-slice": f"(({stack}, f32[1,1000]{{1,0}}, s32[]), {stack}, u32[]{{:S(2)}})",
    }
    lines = [f"%s = {shapes[opcode]} {opcode}-start(%x)", *between, f"%d = {on_chip} copy-done(%s)"]
    return loop(), LOOP.format(lines="\n  ".join(lines))


@pytest.mark.parametrize("opcode", ["copy", "dynamic-slice", "dynamic-update-slice"])
def test_a_copy_to_the_host_takes_its_bytes_over_the_link(opcode, monkeypatch):
    line, computation = host_copy(opcode, work("a", 10_000, inputs="%x"))
    unknown = seconds(line, computations=computation)
    assert sums(unknown) == [30_000, 30_000, 0, 0]
    assert unknown.notes[0].endswith("the host of unknown bandwidth, counted as nothing")
    monkeypatch.setitem(HOST_BANDWIDTHS, CHIP.name, 0.25e9)  # 4,000 bytes take 16,000
    step = seconds(line, computations=computation)
    assert sums(step) == [3 * 16_000, 30_000, 18_000, 30_000]
    way = "from the host" if opcode == "dynamic-slice" else "to the host"
    assert list(step.collectives) == [("copy", (way,))]


def test_copies_one_way_share_the_link_to_the_host(monkeypatch):
    monkeypatch.setitem(HOST_BANDWIDTHS, CHIP.name, 0.25e9)
    shapes = "(f32[1000]{0:S(5)}, f32[1000]{0}, u32[]{:S(2)})"
    back = "(f32[1000]{0}, f32[1000]{0:S(5)}, u32[]{:S(2)})"

    def total(*shapes):
        starts = [f"%s{at} = {shape} copy-start(%p)" for at, shape in enumerate(shapes)]
        ends = [f"%d{at} = f32[1000]{{0}} copy-done(%s{at})" for at in range(len(shapes))]
        return sums(seconds(*starts, work("a", 0), *ends))[0]

    assert total(shapes, shapes) == 32_000
    assert total(shapes, back) == 16_000


ON_SPARSE_CORE = """
%moved (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %c = f32[1000]{0} copy(%a)
}, execution_thread="sparsecore"

%called (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %c = f32[1000]{0} call(%a), to_apply=%moved
}, execution_thread="sparsecore"
"""


def test_what_the_sparse_core_copies_takes_the_bandwidth_that_operations_leave():
    """It reads and writes 8,000 bytes. A product of 10,000 leaves time for 2,000 of them."""
    thread = 'async_execution_thread="sparsecore"'
    at_start = [
        f"%s = ((f32[1000]{{0}}), f32[1000]{{0}}, u32[]) call-start(%p), {thread}, to_apply=%called",
        work("a", 10_000),
        "%d = f32[1000]{0} call-done(%s)",
    ]
    at_update = [
        f"%s = ((), (), (s32[8]{{0}})) async-start(), {thread}, calls=%called",
        work("before", 20_000),
        "%u = ((f32[1000]{0}), f32[1000]{0}, (s32[8]{0})) async-update(%s, %p)",
        work("a", 10_000),
        "%d = f32[1000]{0} async-done(%u)",
    ]
    for lines, expected in ((at_start, 16_000), (at_update, 36_000)):
        step = seconds(*lines, computations=ON_SPARSE_CORE)
        assert sums(step) == [expected, expected, 0, 0]
        assert step.notes == (
            "assumed: 1 x SparseCore start without a collective, counted by its bytes",
        )


SLICES = """
%update (stack: f32[9,1000], row: f32[1,1000], at: s32[]) -> f32[9,1000] {
  %stack = f32[9,1000]{1,0} parameter(0)
  %row = f32[1,1000]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = f32[9,1000]{1,0} dynamic-update-slice(%stack, %row, %at, %zero)
}

%take (stack: f32[9,1000], at: s32[]) -> f32[1,1000] {
  %stack = f32[9,1000]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %t = f32[1,1000]{1,0} dynamic-slice(%stack, %at, %zero), dynamic_slice_sizes={1,1000}
}

%other_tiles (stack: f32[9,1000]) -> f32[9,1000] {
  %stack = f32[9,1000]{1,0} parameter(0)
  ROOT %c = f32[9,1000]{1,0} copy(%stack)
}

%take_of_other_tiles (stack: f32[9,1000], at: s32[]) -> f32[1,1000] {
  %stack = f32[9,1000]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %tiles = f32[9,1000]{1,0} fusion(%stack), kind=kLoop, calls=%other_tiles
  ROOT %t = f32[1,1000]{1,0} dynamic-slice(%tiles, %at, %zero), dynamic_slice_sizes={1,1000}
}

%take_of_padded (stack: f32[9,1000], at: s32[]) -> f32[1,1000] {
  %stack = f32[9,1000]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %c = f32[] constant(0)
  %padded = f32[18,1000]{1,0} pad(%stack, %c), padding=0_9x0_0
  ROOT %t = f32[1,1000]{1,0} dynamic-slice(%padded, %at, %zero), dynamic_slice_sizes={1,1000}
}
"""


def test_slices_and_updates_in_place_move_what_they_take():
    step = seconds(
        work("a", 0),
        "%stack = f32[9,1000]{1,0} bitcast(%p)",
        "%row = f32[1,1000]{1,0} bitcast(%p)",
        "%at = s32[] bitcast(%p)",
        "%u = f32[9,1000]{1,0} fusion(%stack, %row, %at), kind=kLoop, calls=%update",
        "%t = f32[1,1000]{1,0} fusion(%stack, %at), kind=kLoop, calls=%take",
        "%o = f32[1,1000]{1,0} fusion(%stack, %at), kind=kLoop, calls=%take_of_other_tiles",
        "%q = f32[1,1000]{1,0} fusion(%stack, %at), kind=kLoop, calls=%take_of_padded",
        computations=SLICES,
    )
    # a row is read and written, and the place is read
    assert {operation.name: round(operation.seconds * 1e9) for operation in step.operations} == {
        "u": 8_004,
        "t": 8_004,
        "o": 8_004,
        "q": 8_004,
    }


ARITHMETIC = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%sum_of_exponentials (a: f32[1024,1024]) -> f32[] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %c = f32[] constant(0)
  %e = f32[1024,1024]{1,0} exponential(%a)
  ROOT %r = f32[] reduce(%e, %c), dimensions={0,1}, to_apply=%add
}

%many (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  LINES
  ROOT %r = f32[1024,1024]{1,0} negate(%m39)
}
"""


def test_arithmetic_counts_where_it_takes_longer_than_the_bytes():
    """A core takes 1,024 numbers a cycle in each of four slots, and as many exponentials in one."""
    names = ["a", *(f"m{at}" for at in range(40))]
    lines = "\n  ".join(
        f"%{name} = f32[1024,1024]{{1,0}} multiply(%{before}, %{before})"
        for before, name in itertools.pairwise(names)
    )
    fast_memory = CHIP.__class__(**vars(CHIP) | {"memory_bandwidth": 1e15})
    text = program(
        work("a", 0),
        "%x = f32[1024,1024]{1,0} bitcast(%p)",
        "%one = f32[] fusion(%x), kind=kLoop, calls=%sum_of_exponentials",
        "%two = f32[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%many",
        computations=ARITHMETIC.replace("LINES", lines),
    )
    step = step_seconds(text, mesh=MESH, hardware=fast_memory, memory_share=1)
    assert {operation.name: round(operation.seconds * 1e9) for operation in step.operations} == {
        "one": 1_024,
        "two": 41 * 1_024 // 4,
    }


def test_kernels_have_the_arithmetic_of_their_bodies():
    x = jax.ShapeDtypeStruct((1, 512, 256), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((256,), jnp.float32)
    heads = jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1, 512, 1, 64), jnp.float32)
    calls = {
        "inverse_rms": (lambda x: inverse_rms(x, 1e-5), x),
        "gradient_of_norm": (lambda x, scale: gradient_of_norm(x, scale, 1e-5, x, x), x, scale),
        "rotate_halves": (rotate_halves, heads, table, table),
    }
    counts = {}
    for name, (function, *args) in calls.items():
        (body,) = kernel_bodies(jax.make_jaxpr(function)(*args).jaxpr)
        counts[name] = sum(is_arithmetic(equation) for equation in body.eqns)
    assert counts == {name: work.operations for name, work in VECTOR_KERNELS.items()}


def kernel_bodies(jaxpr):
    """Yield the bodies of the loops over strips in the kernels of a jaxpr."""
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        inner = [value for value in inner if hasattr(value, "eqns")]
        if equation.primitive.name == "scan":
            yield from inner
        else:
            for body in inner:
                yield from kernel_bodies(body)


def is_arithmetic(equation):
    """Whether an operation computes on each number of a block, rather than moving it."""
    moves = ("get", "swap", "broadcast_in_dim", "roll")
    sizes = [getattr(value.aval, "size", 0) for value in (*equation.invars, *equation.outvars)]
    return equation.primitive.name not in moves and max(sizes) >= 32 * 256


def test_a_share_of_the_bandwidth_is_asked_for_where_the_table_has_none():
    message = (
        "step_seconds: memory_shares.csv has no share of the HBM bandwidth for 't'.\n"
        "Fix: pass memory_share=, such as 0.7."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        step_seconds(program(work("a", 1)), mesh=MESH, hardware=CHIP)
    with pytest.raises(
        ValueError, match=r"^step_seconds: memory_share must be above 0 and at most 1, got 1\.5\."
    ):
        step_seconds(program(work("a", 1)), mesh=MESH, hardware="v5p", memory_share=1.5)
    assert {chip.name for chip in HARDWARE.values() if chip.clock} == set(MEMORY_SHARES)
    copy = "%c = f32[1000000]{0} copy(%p)"
    full, half = (
        step_seconds(program(work("a", 0), copy), mesh=MESH, hardware="v5p", memory_share=share)
        for share in (1.0, 0.5)
    )
    assert half.total == pytest.approx(2 * full.total)


def test_a_kernel_of_tokamax_computes_the_tiles_of_its_tables():
    """It states the whole square. The mask shows 36 of 8 x 8 tiles."""
    query = "bf16[32,4096,128]"
    stated = 2 * 2 * 32 * 4096**2 * 128
    sizes = '{\\"block_q\\": 512, \\"block_kv\\": 512}'
    config = (
        f', frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{sizes}"\n}}}},'
        f' backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{stated}"}}}}}}'
    )
    inputs = ["s8[36]", "s8[36]", "s32[36]", "s32[36]", query, query, query, "s32[4096,128]"]
    results = f"({query}, f32[32,4096,128], f32[32,4096,128])"
    lines = attention("splash_mha_fwd_residuals", results, inputs, config)
    assert milliseconds(lines, "v5p") == ("stated", 1e3 * stated * 36 / 64 / 459e12)


def test_a_kernel_of_tokamax_takes_its_final_schedule():
    """Its queries may have positions last. It visits ten of 4 x 4 tiles, four of them on the diagonal."""
    lengths_last = "bf16[2,64,128,8192]"
    query = "bf16[2,64,8192,128]"
    sizes = '{\\"block_q\\": 2048, \\"block_kv\\": 2048}'
    config = f', frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{sizes}"\n}}}}'
    tables = ["s32[]", "s8[10]", "s8[10]", "s32[10]"]
    inputs = [*tables, lengths_last, lengths_last, query, "s32[2,8192,128]"]
    results = f"({query}, f32[2,64,8192,128], f32[2,64,8192,128])"
    name = "splash_mha_fwd_segmented_residuals"
    cycles = 128 * (10 * (819 + 13_312) + 4 * 3_336)
    clock = HARDWARE["tpu7x"].clock
    assert clock is not None
    lines = attention(name, results, inputs, config)
    assert milliseconds(lines, "tpu7x") == ("scheduled", 1e3 * cycles / clock)
    inputs[1:3] = ["s8[16]", "s8[16]"]  # not causal
    basis, _ = milliseconds(attention(name, results, inputs, config), "tpu7x")
    assert basis == "stated"


TABLES = """FileNames
1 "/home/me/model.py"
2 "/home/me/train.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=9}
2 {file_name_id=1 function_name_id=1 line=42 end_line=43 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
5 {file_location_id=2 parent_frame_id=2}


"""


def named(line, location):
    return line.replace(
        ", backend_config", f', metadata={{op_name="jit(step)/dot" {location}}}, backend_config'
    )


def test_an_operation_says_which_line_made_it():
    lines = [
        named(work("new", 3), "stack_frame_id=5"),
        work("none", 1),
    ]
    step = seconds(*lines, tables=TABLES)
    assert [
        (operation.name, operation.source, operation.op_name) for operation in step.operations
    ] == [
        ("new", "/home/me/model.py:42", "jit(step)/dot"),
        ("none", "", ""),
    ]


def test_metadata_of_a_kernel_goes_over_several_lines():
    metadata = (
        ', frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 512}"\n}}, '
    )
    lines = kernel("mine", f'{metadata}metadata={{op_name="pallas_call" stack_frame_id=5}}')
    operation, _ = seconds(*lines, tables=TABLES).operations
    assert (operation.op_name, operation.source) == ("pallas_call", "/home/me/model.py:42")


def test_it_prints_sums_the_dearest_and_what_was_assumed():
    product = "%dot = f32[2000]{0} fusion(%a), kind=kOutput, calls=%product"
    step = seconds(
        named(work("a", 10_000), "stack_frame_id=5"), gather("g"), product, tables=TABLES
    )
    assert str(step).splitlines() == [
        "0.036 ms per step, estimated (no measured run on t tells the error): 0.022 compute,"
        " 0.014 exposed communication (0.000 hidden)",
        "   ms  share  calls  operation           where",
        "0.014  38.9%      1  wait: all-gather g",
        "0.012  33.3%      1  dot",
        "0.010  27.8%      1  a                   me/model.py:42 jit(step)/dot",
        "assumed: 1 x product without an estimate, counted by its flops at the peak or its bytes",
    ]
    shown = json.loads(json.dumps(step.to_json()))
    assert shown["total"] == pytest.approx(36e-6)
    assert shown["operations"][2] == step.operations[2]._asdict()
    assert (shown["notes"], shown["reason"]) == (list(step.notes), None)


def test_the_error_bar_stands_beside_the_number(monkeypatch):
    monkeypatch.setitem(ERROR_BARS, "v5p", (3, 0.98, 1.359))
    text = program(work("a", 10_000))

    def told(**options):
        return str(step_seconds(text, mesh=MESH, hardware="v5p", **options)).split(":")[0]

    assert told() == (
        "0.006 ms per step, estimated (3 measured runs on v5p took 0.98 to 1.36 times as long)"
    )
    other = "no measured run on v5p at 0.25 of its bandwidth tells the error"
    assert told(memory_share=0.25) == f"0.006 ms per step, estimated ({other})"
    assert step_seconds(text, mesh=MESH, hardware="v5p").to_json()["error"].startswith("3 measured")


def test_ten_operations_are_enough():
    step = seconds(*(work(f"a{at}", at + 1) for at in range(12)))
    assert [operation.name for operation in step.operations] == [
        f"a{at}" for at in range(11, 1, -1)
    ]
    assert sums(step)[0] == 78


def test_where_nothing_is_estimated_it_says_so():
    text = program("%a = f32[1000]{0} fusion(%p), kind=kLoop, calls=%fused")
    step = step_seconds(text, mesh=MESH, hardware="v5p")
    assert step == StepSeconds(
        None,
        None,
        None,
        None,
        reason="the program holds no cycle estimates; only XLA:TPU writes them.",
    )
    assert str(step) == f"step time unknown: {step.reason}"
    assert step.to_json()["total"] is None
    cpu_step = step_seconds(jax.jit(jnp.sin), jnp.ones(4))
    assert cpu_step.reason == step.reason
    gpu = step_seconds(program(work("a", 1)), mesh=MESH, hardware="h100")
    assert gpu.reason == "h100 has no clock in which XLA estimates; only TPUs have."


def test_a_chip_that_nobody_names_is_asked_for():
    message = (
        "step_seconds: cannot tell the chip of this program.\n"
        "Fix: pass hardware=, such as 'v5p', or the mesh of devices that it was compiled for."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        step_seconds(program(work("a", 1)), mesh=MESH)
    message = "step_seconds: the mesh (data=4) has 4 devices, the program 8."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        step_seconds(program(work("a", 1)), mesh={"data": 4}, hardware="v5p")


def test_devices_tell_their_chip_and_halves_of_one_share_it():
    def devices(kind, *places):
        return [SimpleNamespace(device_kind=kind, coords=place) for place in places]

    assert hardware_of(devices("TPU v5", (0, 0, 0), (1, 0, 0))) == HARDWARE["v5p"]
    assert hardware_of(devices("TPU v5 lite", (0, 0, 0))) == HARDWARE["v5e"]
    half = hardware_of(devices("TPU7x", (0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0)))
    chip = HARDWARE["tpu7x"]
    assert (half.flops, half.link_bandwidth, half.clock) == (
        chip.flops / 2,
        chip.link_bandwidth / 2,
        chip.clock,
    )
    assert hardware_of(jax.devices()) is None
    assert hardware_of([]) is None


def test_clocks_are_those_of_the_matrix_units():
    """Peak = clock x flops of a cycle: so many units of 128 x 128, a multiplication and an addition
    each.
    """
    units = {"v4": 8, "v5e": 4, "v5p": 8, "v6e": 16, "tpu7x": 32}
    for name, count in units.items():
        assert HARDWARE[name].clock * count * 128 * 128 * 2 == pytest.approx(
            HARDWARE[name].flops, rel=0.005
        )
    assert {chip.name for chip in HARDWARE.values() if chip.clock} == set(units)
