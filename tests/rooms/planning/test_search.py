"""`so.plan` ranks layouts, drops some, returns them, and says so when nothing fits.

Times from first principles.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from support.layouts import SHAPE
from support.tiers import tiered

import shardopt as so
from benchmarks import transformer
from shardopt.planning import HARDWARE, Hardware, ParallelLayout, predict
from shardopt.planning._costs import StepTransfer, seconds, torus_axes, traffic
from shardopt.planning._hardware import find_hardware
from shardopt.planning._layout import place
from shardopt.planning._models import find_model

pytestmark = pytest.mark.fast

CHIP = Hardware("toy", 1e12, 10**9, 1e11, 1e10, 0, 8, 1e9, "made up")
WORK = SHAPE.workload()


def refused(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def test_the_best_plan_trains(mesh_of):
    small = dataclasses.replace(CHIP, memory_bytes=20 * 10**6)
    plans = so.plan(SHAPE, hardware=small, chips=8, batch_size=16, gather_dtype=None)
    best = plans.best
    opt = so.hybrid(
        optax.adamw(1e-3), so.make_mesh(**best.mesh), transformer.model(SHAPE), **best.strategy
    )
    assert opt.mesh.size == 8
    assert opt.specs(SHAPE.abstract_params()).params["head"]


@pytest.mark.parametrize(
    ("name", "devices"),
    tiered([("v4", 8), ("tpu7x", 16), ("v5p", 8)], lambda row: row[0] == "tpu7x"),
)
def test_a_mesh_has_the_devices_that_the_chips_show(name, devices):
    """A chip of tpu7x is two devices with half of its memory and arithmetic each.

    A v4 joins its two cores in one.
    """
    plans = so.plan("llama3-8b", hardware=name, chips=8, batch_size=16)
    assert plans.devices == plans.best.layout.num_chips == devices
    assert plans.limit == HARDWARE[name].memory_bytes * 8 // devices * 0.9
    assert plans.best.tokens_per_second == pytest.approx(
        16 * plans.workload.tokens / plans.best.time.total
    )
    flops = plans.workload.model_flops * 16 / plans.best.time.total
    assert plans.best.mfu == pytest.approx(flops / (8 * HARDWARE[name].flops))
    assert ("8 chips of tpu7x (16 devices)" in str(plans)) is (name == "tpu7x")


UNREADABLE = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason='its jaxlib cannot read the program back: "async-update" of several operands',
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4", pytest.param("tpu7x", marks=UNREADABLE)])
def test_the_planned_mesh_compiles(name):
    """Without a pipeline, whose branches take the TPU's compiler many minutes.

    The mesh is the same number of devices.
    """
    shape = dataclasses.replace(SHAPE, num_layers=2)
    work = {"batch_size": 8, "placements": ["fsdp"], "schedules": [], "gather_dtype": None}
    plans = so.plan(shape, hardware=name, chips=4, **work)
    report = so.planning.aot(
        lambda mesh: so.hybrid(
            optax.adamw(1e-3), mesh, transformer.model(shape), **plans.best.strategy
        ),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 8),
        topology=f"{name}:2x2x1",
        **plans.best.mesh,
    )
    assert math.prod(report.mesh_shape.values()) == plans.devices
    assert plans.limit == report.hbm_bytes * 0.9


def test_plans_are_ranked_by_time_and_fit():
    plans = so.plan("llama3-8b", hardware="v5p", chips=16, batch_size=16)
    times = [candidate.time.total for candidate in plans.ranked]
    assert times == sorted(times)
    assert all(candidate.memory.total <= plans.limit for candidate in plans.ranked)
    assert all(candidate.layout.num_chips == 16 for candidate in plans.ranked)
    tight = [candidate for candidate in plans.dropped if candidate.missing_bytes]
    assert [candidate.missing_bytes for candidate in tight] == sorted(
        candidate.missing_bytes for candidate in tight
    )
    assert {candidate.layout for candidate in plans.ranked}.isdisjoint(
        candidate.layout for candidate in plans.dropped
    )
    kinds = {
        (candidate.layout.placement, candidate.layout.schedule, candidate.layout.remat)
        for candidate in plans.ranked
    }
    assert {placement for placement, _, _ in kinds} == {"zero1", "zero2", "fsdp", "ddp"}
    assert {schedule for _, schedule, _ in kinds} == {None, *so.planning._search.SCHEDULES}


@pytest.mark.default
def test_the_fastest_recomputes_least_of_what_fits():
    work = so.planning.MODELS["llama3-8b"].workload()
    _, everything, most_saved, *_, least_saved, full = work.remat_choices()
    layout = ParallelLayout(data=16, gather_dtype=jnp.bfloat16)
    none, most_saved, little_saved, all_again = (
        predict(work, layout._replace(remat=remat), hardware=HARDWARE["v5p"], batch_size=16)
        for remat in (False, most_saved, least_saved, full)
    )
    assert (
        none.memory.total
        > most_saved.memory.total
        > little_saved.memory.total
        > all_again.memory.total
    )
    assert none.time.total < most_saved.time.total < little_saved.time.total < all_again.time.total
    for fits, headroom in ((none, 0.0), (most_saved, 1.0), (little_saved, 1.0), (all_again, 1.0)):
        size = int(fits.memory.total + headroom)
        chip = dataclasses.replace(HARDWARE["v5p"], memory_bytes=size)
        # the layouts that are compared have no pipeline
        plans = so.plan(
            work,
            hardware=chip,
            chips=16,
            batch_size=16,
            placements=["fsdp"],
            schedules=[],
            headroom=0.0,
        )
        ranked = [
            candidate
            for candidate in plans.ranked
            if candidate.layout._replace(remat=False) == layout
        ]
        assert ranked[0].layout.remat == fits.layout.remat
        assert ranked[0].strategy["remat"] == fits.layout.remat
        assert everything not in [
            candidate.layout.remat for candidate in ranked
        ]  # it is fsdp without remat


def test_names_are_not_predicted_in_pipelines():
    message = (
        "plan: what remat='save:qkv' keeps in a pipeline is not predicted.\nFix: use remat=True or"
        " False there."
    )
    with refused(ValueError, message):
        predict(
            WORK, ParallelLayout(data=2, pipeline=2, remat="save:qkv"), hardware=CHIP, batch_size=8
        )


def test_plans_print_a_table_and_give_json():
    plans = so.plan("gpt2", hardware="a100", chips=4, batch_size=8)
    lines = str(plans).splitlines()
    assert lines[0] == "gpt2 (124 million parameters) on 4 chips of a100, 8 rows per batch"
    assert lines[1].split() == [
        "layout",
        "memory",
        "step",
        "MFU",
        "compute",
        "tensor",
        "data",
        "pipeline",
        "bubble",
    ]
    uneven = any("do not divide" in line for line in lines)
    assert lines[-3 - uneven : -1 - uneven] == [
        (
            "all numbers are estimated: on no chip of this name were steps measured; on others they"
            " took 0.78 to 1.97 times as long"
        ),
        "memory: 70B on v5e took 15 to 17% more",
    ]


def test_plans_state_how_long_measured_steps_took():
    text = str(so.plan("gpt2", hardware="v6e", chips=4, batch_size=8))
    assert (
        "all numbers are estimated: 16 measured runs on v6e took 1.52 to 1.7 (median 1.62) times as"
        " long\n"
    ) in text


@pytest.mark.slow
def test_slices_hold_a_copy_each_or_share_one():
    plans = so.plan(
        "llama3-8b", hardware="v6e", chips=512, slices=2, batch_size=512, placements=("fsdp",)
    )
    assert {candidate.layout.replica for candidate in plans.ranked} == {1, 2}


def test_the_optimizer_counts():
    layout = ParallelLayout(data=8, placement="ddp")
    size = WORK.num_parameters * 4
    for tx, copies in (
        (optax.sgd(0.1), 0),
        (optax.sgd(0.1, momentum=0.9), 1),
        (optax.adamw(0.1), 2),
    ):
        prediction = predict(WORK, layout, hardware=CHIP, batch_size=8, tx=tx)
        assert prediction.memory.opt_state == pytest.approx(copies * size, abs=16)
    factored = predict(WORK, layout, hardware=CHIP, batch_size=8, tx=optax.adafactor(0.1))
    assert factored.memory.opt_state < size / 2


@pytest.mark.parametrize(
    ("placement", "params", "state"),
    [("ddp", 1, 1), ("zero1", 1, 8), ("zero2", 1, 8), ("fsdp", 8, 8)],
)
def test_bytes_a_parameter_are_those_of_the_placement_table(placement, params, state):
    work = so.planning.MODELS["llama3-8b"].workload()
    prediction = predict(
        work, ParallelLayout(data=8, placement=placement), hardware=HARDWARE["v5p"], batch_size=8
    )
    assert prediction.memory.params == pytest.approx(4 * work.num_parameters / params, rel=1e-3)
    assert prediction.memory.opt_state == pytest.approx(8 * work.num_parameters / state, rel=1e-3)


def test_rings_use_links_within_a_node_and_the_network_beyond():
    layout = ParallelLayout(data=4, tensor=4)

    def reduce(axis):
        return seconds(StepTransfer("all-reduce", axis, "x", 1e9, 1), layout, CHIP)

    # tensor within a node of 8 over links; data: pairs within one, then two nodes, both members
    # sharing the network
    assert reduce("tensor") == pytest.approx(2 * 3 / 4 * 1e9 / 1e10)
    assert reduce("data") == pytest.approx(2 * 1 / 2 * 1e9 / 1e10 + 2 * 1 / 2 * 1e9 / 2 / 1e9)
    gather = seconds(StepTransfer("all-gather", "tensor", "x", 1e9, 3), layout, CHIP)
    assert gather == pytest.approx(3 * 3 / 4 * 1e9 / 1e10)
    send = ParallelLayout(data=1, pipeline=16)
    assert seconds(
        StepTransfer("collective-permute", "pipeline", "x", 1e9, 1), send, CHIP
    ) == pytest.approx(1.0)


def test_a_gather_over_a_torus_takes_half_of_an_all_reduce():
    gather = StepTransfer("all-gather", "data", "weights", 1e9, 1)
    for name, chips, axes in (("v5p", 64, 3), ("v6e", 256, 2)):
        chip = HARDWARE[name]
        layout = ParallelLayout(data=chips)
        expected = (chips - 1) / chips * 1e9 / (axes * chip.link_bandwidth)
        assert seconds(gather, layout, chip) == pytest.approx(expected)
        assert seconds(gather._replace(kind="all-reduce"), layout, chip) == pytest.approx(
            2 * expected
        )


def test_a_mesh_axis_has_whole_axes_of_a_torus_to_itself():
    # With 16 chips, 2, 4, 8 and 16 of them have 0.5, 1, 1.5 and 2 axes. With 64 chips, 4, 16 and 32
    # of them have 1, 2 and 2.5.
    assert [torus_axes(size, 16, HARDWARE["v5e"]) for size in (2, 4, 8, 16)] == [1, 1, 1, 2]
    assert [torus_axes(size, 64, HARDWARE["v5p"]) for size in (4, 16, 32, 64)] == [1, 2, 2, 3]


def test_what_a_chip_cannot_hide_is_waited_for():
    layout = ParallelLayout(data=8)
    predicted_times = {
        kinds: (
            predict(
                WORK,
                layout,
                hardware=dataclasses.replace(CHIP, flops=1.0, hides=kinds),
                batch_size=8,
            ).time
        )
        for kinds in ((), ("all-gather",), ("all-gather", "reduce-scatter"))
    }
    sent = predict(WORK, layout, hardware=CHIP, batch_size=8).transfers

    def of(kind):
        return sum(
            seconds(transfer, layout, CHIP)
            for transfer in sent
            if transfer.hidden and transfer.kind == kind
        )

    none, gathers, both = (time.data for time in predicted_times.values())
    assert none - gathers == pytest.approx(of("all-gather"))
    assert gathers - both == pytest.approx(of("reduce-scatter"))
    assert both < gathers < none


def test_gradients_of_micro_batches_come_and_go():
    single_batch = predict(
        WORK, ParallelLayout(data=2, placement="ddp"), hardware=CHIP, batch_size=8
    )
    two = predict(
        WORK, ParallelLayout(data=2, placement="ddp", micro_batches=2), hardware=CHIP, batch_size=8
    )
    # the same activations and products in two halves; weights take less time than products
    moved = 2 * 4 * WORK.num_parameters / CHIP.memory_bandwidth
    assert two.time.compute - single_batch.time.compute == pytest.approx((2 * 2 - 1) * moved)


def test_time_without_communication_is_flops_over_peak():
    fast = dataclasses.replace(
        CHIP, memory_bandwidth=1e30, link_bandwidth=1e30, network_bandwidth=1e30
    )
    for tensor in (1, 2):
        prediction = predict(
            WORK, ParallelLayout(data=2, tensor=tensor), hardware=fast, batch_size=8
        )
        flops = 3 * (WORK.num_blocks * WORK.block_flops + WORK.ends_flops) * 8
        assert prediction.time.total == pytest.approx(flops / (2 * tensor) / 1e12)
    remat_prediction = predict(
        WORK, ParallelLayout(data=2, remat=True), hardware=fast, batch_size=8
    )
    assert (
        remat_prediction.time.total
        > predict(WORK, ParallelLayout(data=2), hardware=fast, batch_size=8).time.total
    )


def test_a_pipeline_idles_as_its_schedule_says():
    fast = dataclasses.replace(
        CHIP, memory_bandwidth=1e30, link_bandwidth=1e30, network_bandwidth=1e30
    )
    bare = WORK._replace(ends_flops=0.0)
    layout = ParallelLayout(pipeline=4, schedule="eager_one_f_one_b", micro_batches=8)
    time = predict(bare, layout, hardware=fast, batch_size=8).time
    assert time.bubble / time.total == pytest.approx(layout.table().program_bubble_fraction)


def test_messages_that_are_sent_ahead_hide_behind_passes():
    layout = ParallelLayout(
        pipeline=4, placement="ddp", micro_batches=8, schedule="zero_bubble_v", chunks=2
    )
    prediction = predict(WORK, layout, hardware=CHIP, batch_size=8)
    each = {
        transfer: seconds(transfer, layout, CHIP)
        for transfer in prediction.transfers
        if transfer.axis == "pipeline"
    }
    messages = sum(time for transfer, time in each.items() if transfer.what == "activations")
    assert prediction.time.pipeline == pytest.approx(sum(each.values()) - messages)
    fast = predict(
        WORK, layout, hardware=dataclasses.replace(CHIP, link_bandwidth=1e30), batch_size=8
    )
    assert 0 < prediction.time.bubble - fast.time.bubble < messages / 2


def test_unknown_names_list_the_known_ones():
    known = "a100, h100, h200, b200, v4, v5e, v5p, v6e, tpu7x"
    message = (
        f"plan: unknown hardware 'v9'.\nFix: use one of {known}, or describe the chip with"
        " so.planning.Hardware."
    )
    with refused(ValueError, message):
        so.plan("gpt2", hardware="v9", chips=8, batch_size=8)
    with refused(TypeError, "plan: hardware must be a name or a Hardware, got 7.\n"
        "Fix: pass a name such as 'v5p', or a so.planning.Hardware."):  # fmt: skip
        so.plan("gpt2", hardware=7, chips=8, batch_size=8)
    names = (
        "dual_pipe_v, eager_one_f_one_b, gpipe, interleaved, looped_breadth_first, one_f_one_b,"
        " zero_bubble, "
    )
    names += "zero_bubble_2, zero_bubble_lockstep, zero_bubble_v"
    with refused(ValueError, f"plan: unknown schedule 'two_f'.\nFix: use some of {names}."):
        so.plan("gpt2", hardware="v5p", chips=8, batch_size=8, schedules=["two_f"])
    message = "plan: unknown placement 'zero9'.\nFix: use some of ddp, zero1, zero2, fsdp."
    with refused(ValueError, message):
        so.plan("gpt2", hardware="v5p", chips=8, batch_size=8, placements=["zero9"])


def test_numbers_out_of_range_are_refused():
    with refused(TypeError, "plan: chips must be an integer, got 8.0 (float)."):
        so.plan("gpt2", hardware="v5p", chips=8.0, batch_size=8)
    with refused(ValueError, "plan: batch_size must be at least 1, got 0."):
        so.plan("gpt2", hardware="v5p", chips=8, batch_size=0)
    message = (
        "plan: 9 chips cannot be spread evenly over 2 slices.\nFix: choose chips divisible by 2."
    )
    with refused(ValueError, message):
        so.plan("gpt2", hardware="v5p", chips=9, slices=2, batch_size=8)
    with refused(ValueError, "plan: headroom must be at least 0 and below 1, got 1."):
        so.plan("gpt2", hardware="v5p", chips=8, batch_size=8, headroom=1)


def test_a_model_that_fits_nowhere_says_by_how_many_bytes_and_what_would_help():
    with pytest.raises(
        ValueError,
        match=r"^plan: llama3-405b on 8 chips of v5e with 8 rows per batch: nothing fits",
    ) as caught:
        so.plan("llama3-405b", hardware="v5e", chips=8, batch_size=8)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    missing = [
        int(re.search(r"([\d,]+) bytes too many", line)[1].replace(",", "")) for line in lines[1:4]
    ]
    assert missing == sorted(missing)
    # parameters, gradients and state alone are 16 bytes a parameter
    assert missing[0] > 16 * 405.8e9 / 8 - HARDWARE["v5e"].memory_bytes
    assert re.match(r"Fix: use about \d+ chips or more, or fewer rows per batch\.", lines[4])
    with pytest.raises(ValueError, match=r"no layout divides evenly"):
        so.plan("gpt2", hardware="v5p", chips=7, batch_size=3, placements=["ddp"])


@pytest.mark.parametrize("name", HARDWARE)
def test_hardware_is_plausible_and_has_a_source(name):
    chip = find_hardware(name.upper())
    assert 1e14 < chip.flops < 1e16
    assert 10 < chip.flops / chip.memory_bandwidth < 1000  # flops a byte
    assert chip.link_bandwidth < chip.memory_bandwidth
    assert chip.network_bandwidth < chip.link_bandwidth
    assert chip.source
    assert find_hardware(chip) is chip


def test_gather_dtype_is_for_fsdp_alone():
    work = SHAPE.workload()
    for placement in ("zero1", "fsdp"):
        prediction = predict(
            work,
            ParallelLayout(data=8, placement=placement, gather_dtype=jnp.bfloat16),
            hardware=CHIP,
            batch_size=8,
        )
        assert ("gather_dtype" in prediction.strategy) == (placement == "fsdp")


def test_scatter_dtype_is_for_all_that_scatter():
    plans = so.plan("gpt2", hardware="v5e", chips=8, batch_size=64, scatter_dtype=jnp.bfloat16)
    for candidate in plans.ranked:
        assert getattr(candidate.strategy.get("reducer"), "dtype", None) == (
            None if candidate.layout.placement == "ddp" else jnp.bfloat16
        )
    wide = so.plan(
        "gpt2", hardware="v5e", chips=8, batch_size=64, remat=(True,), placements=("fsdp",)
    ).best
    half = predict(
        plans.workload,
        wide.layout._replace(scatter_dtype=jnp.bfloat16),
        hardware=plans.hardware,
        batch_size=64,
    )

    def scattered(candidate):
        return [t.bytes for t in candidate.transfers if t.kind == "reduce-scatter"]

    assert scattered(wide) == [2 * size for size in scattered(half)]
    assert half.time.total <= wide.time.total


@pytest.mark.slow
def test_long_rows_are_split_over_context_where_rows_are_few():
    """A row of 131,072 tokens: eight rows on 64 chips leave eight chips to each, which tensor or
    context share.
    """
    shape = dataclasses.replace(find_model("llama3-8b"), length=131_072)
    plans = so.plan(shape, hardware="v5p", chips=64, batch_size=8)
    best = plans.best
    assert best.mesh["context"] >= 8
    assert (
        best.mesh["data"] * best.mesh["context"] * best.mesh["tensor"] * best.mesh["pipeline"] == 64
    )
    assert best.time.total < min(
        candidate.time.total for candidate in plans.ranked if candidate.layout.context == 1
    )
    assert "context" in str(plans).splitlines()[1]
    short = so.plan("llama3-8b", hardware="v5p", chips=64, batch_size=128)
    assert all(candidate.layout.context == 1 for candidate in short.ranked)
    assert "context" not in str(short).splitlines()[1]


def test_where_nothing_fits_every_size_of_context_is_tried():
    """A device has a row of 1536 positions, whose activations do not fit."""
    shape = dataclasses.replace(SHAPE, length=1536)
    machine = {"hardware": dataclasses.replace(CHIP, memory_bytes=30 * 10**6), "chips": 12}
    options = {"batch_size": 12, "placements": ["fsdp"], "schedules": [], "headroom": 0.0}
    plans = so.plan(shape, **machine, **options)
    tried = {candidate.layout.context for candidate in (*plans.ranked, *plans.dropped)}
    assert tried == {1, 2, 3, 4, 6, 12}
    assert min(candidate.layout.context for candidate in plans.ranked) > 1
    assert len({candidate.layout for candidate in plans.dropped}) == len(plans.dropped)
    roomy = so.plan(shape, **machine | {"hardware": CHIP}, **options)
    assert {candidate.layout.context for candidate in roomy.ranked} == {1}


@pytest.mark.parametrize(
    ("heads", "size", "kind"), [(8, 4, "all-to-all"), (2, 4, "collective-permute")]
)
def test_keys_and_values_cross_context_by_the_method_of_attention(heads, size, kind):
    """C devices send 3 (C - 1) KV in gathers, and C - 1 hops in fp32. KV is the bytes of a device's
    keys and values in bf16.
    """
    shape = dataclasses.replace(find_model("llama3-8b"), length=32_768, num_kv_heads=heads)
    placed = place(shape.workload(), ParallelLayout(data=2, context=size), {})
    transfers = [
        transfer for transfer in traffic(placed, batch_size=2) if transfer.axis == "context"
    ]
    assert {transfer.kind for transfer in transfers} == {kind}
    blocks = 32
    T = 32_768 // size
    K = 128
    if kind == "all-to-all":
        # queries, keys, values and their mixture, forwards and backwards
        each = 2 * T * (32 + heads) * K * 2
        assert (
            sum(transfer.wire_bytes(placed.layout.sizes) for transfer in transfers)
            == 2 * blocks * each * (size - 1) / size
        )
    else:
        keys = 2 * T * heads * K
        assert sum(transfer.wire_bytes(placed.layout.sizes) for transfer in transfers) == blocks * (
            size - 1
        ) * keys * (2 + 2 + 4)


EXPERTS = dataclasses.replace(
    find_model("llama3-8b"),
    name="moe",
    num_layers=4,
    hidden=1024,
    vocab_size=1024,
    length=256,
    num_experts=8,
    top_k=2,
)


def test_tokens_travel_to_experts_whose_gradients_do_not():
    """K T D numbers there and back, forwards and backwards, once more there with remat.

    Experts are summed over data alone.
    """
    sent = {}
    for remat in (False, True, "save:qkv"):
        layout = ParallelLayout(data=2, expert=4, placement="ddp", remat=remat)
        placed = place(EXPERTS.workload(), layout, {})
        sent[remat] = traffic(placed, batch_size=16)
    # 2 rows on a device, 2 experts a token, 2 bytes
    buffer = 2 * 2 * 256 * 4096 * 2
    sizes = {"data": 2, "expert": 4}
    for remat, ways in ((False, 4), (True, 5), ("save:qkv", 5)):
        (tokens,) = (transfer for transfer in sent[remat] if transfer.axis == "expert")
        assert (tokens.kind, tokens.bytes, tokens.calls) == ("all-to-all", buffer, ways * 4)
        assert tokens.wire_bytes(sizes) == ways * 4 * buffer * 3 / 4
    numbers = 4 * 8 * 4096 * 3 * 1024
    over = {
        transfer.also: transfer.bytes for transfer in sent[False] if transfer.kind == "all-reduce"
    }
    assert over[()] == 4 * numbers // 4
    assert over[("expert",)] == 4 * (EXPERTS.num_parameters - numbers)


def test_experts_on_devices_are_bytes_and_room_for_the_tokens_that_could_come():
    tx = optax.sgd(0.1)
    work = EXPERTS.workload()
    alone, shared = (
        predict(work, layout, hardware=HARDWARE["v5p"], batch_size=64, tx=tx)
        for layout in (
            ParallelLayout(data=8, placement="ddp"),
            ParallelLayout(data=2, expert=4, placement="ddp"),
        )
    )
    experts = 4 * 4 * 8 * 4096 * 3 * 1024
    params_alone = alone.memory.params
    assert 0 <= params_alone - shared.memory.params - experts * 3 / 4 < 0.001 * params_alone
    assert ("^blocks/experts_", "experts") in shared.strategy["rules"]
    # each of 4 devices could get min(2, 2) copies of all tokens where 2 come: 4 times the rows and
    # hidden units
    extra_bytes = place(work, shared.layout, {}).workload.residuals.on(1) - work.residuals.on(1)
    assert extra_bytes == 3 * 2 * 2 * 256 * (4096 + 2 * 1024)
    # hidden units are wide here; with narrow ones, rows that travel take the most bytes, in chunks
    # too
    narrow = dataclasses.replace(EXPERTS, hidden=64, expert_chunk=64).workload()
    extra_bytes = narrow.over_experts(4).working.on(1) - narrow.working.on(1)
    # 2 of width D and 6 of width F of 64 tokens, 2 copies each
    held = 2 * 2 * 64 * (2 * 4096 + 6 * 64)
    assert extra_bytes == 4 * 6 * 2 * 2 * 64 * 4096 - held
    assert "expert" in str(so.plan(EXPERTS, hardware="v5e", chips=8, batch_size=16)).splitlines()[1]
