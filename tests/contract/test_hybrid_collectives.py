"""The compiled pipeline sends the bytes that the schedule's table and the placement state, on the
stated axis, and nothing more.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.pipelines import SCHEDULES
from support.table import STRATEGIES
from support.tiers import tiered
from support.traffic import Expected, check_traffic

import shardopt as so
from shardopt.hlo import audit
from shardopt.models import gpt

LAYERS = 8
WIDTH = 32
HIDDEN = 128
ROWS = 32
INPUTS = 32
OUTPUTS = 40
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]
SCALARS = 64  # losses, weights and norms
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["out"]) ** 2),
)
SHAPES = {
    "blocks": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
    "in": (INPUTS, WIDTH),
    "out": (WIDTH, OUTPUTS),
}
PARAMS = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)
BATCH = jax.ShapeDtypeStruct((ROWS, INPUTS), jnp.float32)
BLOCK = 4 * 2 * WIDTH * HIDDEN
OUTER = 4 * (INPUTS + OUTPUTS) * WIDTH
CASES = [
    ("eager_one_f_one_b", "ddp", {"data": 2, "tensor": 2, "pipeline": 2}, False),
    ("gpipe", "zero2", {"data": 2, "tensor": 2, "pipeline": 2}, True),
    ("zero_bubble", "fsdp", {"data": 2, "tensor": 2, "pipeline": 2}, False),
    ("interleaved", "zero1", {"data": 1, "tensor": 2, "pipeline": 4}, False),
    ("zero_bubble_lockstep_2", "zero1", {"data": 2, "pipeline": 4}, True),
    ("one_f_one_b", "zero2", {"data": 4, "pipeline": 2}, False),
    ("v_shaped", "fsdp", {"data": 2, "pipeline": 4}, False),
    ("zero_bubble_lockstep", "ddp", {"replica": 2, "data": 2, "pipeline": 2}, False),
    ("eager_one_f_one_b", "fsdp", {"replica": 2, "data": 2, "pipeline": 2}, True),
]
REPEATED = (
    "gpipe",
    "one_f_one_b",
    "zero_bubble",
    "zero_bubble_lockstep",
    "zero_bubble_lockstep_2",
    "v_shaped",
)  # their terms are in the other rows


def make(schedule, placement, mesh, remat=False, micro_batches=4):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    rules = RULES if mesh.shape["tensor"] > 1 else ()
    options = {
        "micro_batches": micro_batches,
        "placement": placement,
        "rules": rules,
        "remat": remat,
    }
    return so.hybrid(tx, mesh, MODEL, schedule=SCHEDULES[schedule], **options)


def stated_table(schedule, placement, sizes, remat):
    """Return the bytes per device that the docstring of hybrid states."""
    data = sizes["data"]
    tensor = sizes.get("tensor", 1)
    replica = sizes.get("replica", 1)
    ticks = schedule.num_ticks
    k = LAYERS // (schedule.num_stages * schedule.num_chunks)
    activation = 4 * ROWS // (data * replica) // schedule.num_micro_batches * WIDTH
    axes = tuple(axis for axis in ("replica", "data") if axis in sizes)
    splits_weights = schedule.ticks.weight is not None
    stage = BLOCK * LAYERS // sizes["pipeline"] // tensor
    runs = ticks * k * BLOCK // tensor  # of a block in every tick, at the most
    permutes = sum(map(bool, schedule.forward_shifts)) + sum(map(bool, schedule.backward_shifts))
    table = [
        Expected(
            "collective-permute",
            "pipeline",
            permutes * ticks * activation,
            permutes * ticks,
            in_loop=True,
        )
    ]
    if tensor > 1:
        # a sum in the forward and one in the backward pass of a block; with remat, again in the
        # backward pass
        sums = (3 if remat else 2) * ticks * k
        table.append(Expected("all-reduce", "tensor", sums * activation, sums, in_loop=True))
    # parameters, as they are split over data, and gradients, as they are reduced
    if schedule.num_chunks > 1:
        params, grads = (
            stage // data if split else stage for split in (placement == "fsdp", placement != "ddp")
        )
        table.append(Expected("collective-permute", "pipeline", params + grads, in_loop=False))
    if placement == "ddp":
        table.append(Expected("all-reduce", axes, stage, in_loop=False))
        return [*table, Expected("all-reduce", (*axes, "pipeline"), OUTER, in_loop=False)]
    table.append(Expected("reduce-scatter", "data", OUTER, in_loop=False))
    table.append(
        Expected(
            "all-reduce", ("replica", "pipeline") if replica > 1 else "pipeline", OUTER // data
        )
    )
    if replica > 1:
        table.append(Expected("all-reduce", "replica", stage // data, in_loop=False))
    if placement == "zero1":
        table.append(Expected("reduce-scatter", "data", stage, in_loop=False))
    else:
        table.append(Expected("reduce-scatter", "data", runs, in_loop=True))
    if placement == "fsdp":
        table.append(Expected("all-gather", "data", OUTER, in_loop=False))
        # remat gathers for the forward that it runs again, and once more for the backward
        gathers = 3 if remat else 2
        table.append(Expected("all-gather", "data", gathers * runs, in_loop=True))
    else:
        table.append(Expected("all-gather", "data", stage + OUTER, in_loop=False))
    assert splits_weights == ("zero" in schedule.name or schedule.name == "v_shaped")
    return table


@pytest.mark.parametrize(
    ("name", "placement", "sizes", "remat"),
    tiered(CASES, lambda row: row[0] not in REPEATED and row[1] != "ddp"),
)
def test_the_compiled_step_sends_what_the_table_says(name, placement, sizes, remat, mesh_of):
    opt = make(name, placement, mesh_of(**sizes), remat)
    report = audit(opt.step, opt.abstract_state(PARAMS), BATCH)
    table = stated_table(opt.config.schedule, placement, sizes, remat)
    check_traffic(report, [row for row in table if row.bytes], min_bytes=SCALARS, rtol=0.01)
    assert all(
        collective.axes == ("pipeline",)
        for collective in report.of(kind="collective-permute").collectives
    )
    if placement in ("ddp", "zero1"):
        assert not report.of(axis="data", in_loop=True).collectives
    assert not report.of(axis="replica", in_loop=True).collectives


@pytest.mark.slow
def test_gpt_moves_activations_over_tensor_and_nothing_else_in_the_loop(mesh_of):
    """Four sums a block: were a ring or a sum of gradients whole over tensor, gathers would be
    here.
    """
    config = gpt.config(vocab_size=64, dim=32, num_layers=4, num_heads=4, mlp_multiple=2)
    for schedule in ("eager_one_f_one_b", "zero_bubble"):
        opt = so.hybrid(
            optax.adamw(1e-3),
            mesh_of(data=2, tensor=2, pipeline=2),
            gpt.model(config),
            schedule=SCHEDULES[schedule],
            micro_batches=4,
            rules=gpt.rules,
        )
        state = opt.abstract_state(
            jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
        )
        report = audit(opt.step, state, {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)})
        looped = report.of(axis="tensor", in_loop=True)
        activation = 4 * 2 * 16 * 32
        ticks = opt.config.schedule.num_ticks
        inside = [
            collective
            for collective in looped.collectives
            if collective.bytes >= activation and len(collective.loops) > 1
        ]
        assert {collective.kind for collective in inside} == {"all-reduce"}
        assert (
            sum(collective.bytes * collective.calls for collective in inside)
            == 4 * 2 * ticks * activation
        ), str(looped)
        assert not [
            collective
            for collective in looped.collectives
            if collective.kind != "all-reduce" and collective.bytes > SCALARS
        ], str(looped)


@pytest.mark.parametrize(
    "placement", tiered(["ddp", "zero1", "zero2", "fsdp"], lambda name: name == "fsdp")
)
def test_one_stage_is_the_plain_strategy(placement, mesh_of):
    """The two programs are the very same, not only similar."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    options = {} if placement == "ddp" else {"min_shard_elements": 8}
    plain = STRATEGIES[placement](
        tx, mesh_of(data=4, tensor=2), MODEL, micro_batches=2, rules=RULES
    )
    options = {
        "schedule": SCHEDULES["interleaved"],
        "micro_batches": 2,
        "placement": placement,
        "rules": RULES,
    } | options
    one_stage = so.hybrid(tx, mesh_of(data=4, tensor=2, pipeline=1), MODEL, **options)
    texts = [
        opt.step.lower(opt.abstract_state(PARAMS), BATCH).as_text() for opt in (plain, one_stage)
    ]
    assert texts[0] == texts[1]
    assert one_stage.config.schedule is None


def test_all_sizes_of_one_send_nothing(mesh_of):
    opt = make("eager_one_f_one_b", "fsdp", mesh_of(data=1, tensor=1, pipeline=1))
    assert not audit(opt.step, opt.abstract_state(PARAMS), BATCH).collectives


def test_remat_on_one_stage_is_that_of_the_model(mesh_of):
    mesh = mesh_of(data=2, pipeline=1)
    one_stage = make("gpipe", "ddp", mesh, remat=True)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    full = so.ddp(tx, mesh, MODEL._replace(remat="full"), micro_batches=4)
    texts = [
        opt.step.lower(opt.abstract_state(PARAMS), BATCH).as_text() for opt in (one_stage, full)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("placement", "sizes"),
    tiered(
        itertools.product(
            ["ddp", "zero1", "fsdp"],
            [{"data": 2, "tensor": 2, "pipeline": 2}, {"data": 2, "pipeline": 4}],
        ),
        lambda row: "tensor" in row[1] and row[0] == "fsdp",
    ),
    ids=str,
)
def test_each_device_holds_the_bytes_of_its_stage(placement, sizes, mesh_of):
    """A device holds a stage's part of blocks, and outer leaves whole over pipeline.

    On data and tensor it holds the same parts as without a pipeline.
    """
    opt = make("interleaved", placement, mesh_of(**sizes))
    opt.specs(PARAMS)
    blocks = BLOCK * LAYERS // sizes["pipeline"] // sizes.get("tensor", 1)
    outer = OUTER
    share = {"ddp": (1, 1), "zero1": (1, 2), "fsdp": (2, 2)}[placement]
    report = opt.config.report()
    assert report.params_bytes == (blocks + outer) // share[0]
    moments = 2 * (blocks + outer) // share[1]
    assert moments <= report.opt_state_bytes <= moments + SCALARS
    compiled = opt.step.lower(opt.abstract_state(PARAMS), BATCH).compile().memory_analysis()
    held = report.params_bytes + report.opt_state_bytes + 4 * ROWS * INPUTS // sizes["data"]
    np.testing.assert_allclose(compiled.argument_size_in_bytes, held, atol=SCALARS)
    assert compiled.alias_size_in_bytes >= report.params_bytes + report.opt_state_bytes
