"""Stages of unequally many blocks equal one device, run their own blocks and no others, and keep
the user's own leaves.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.pipelines import SCHEDULES, block_problem
from support.reference import OPTIMIZERS, relative_difference, trains_as_one_device
from support.tiers import tiered

import shardopt as so
from shardopt.hlo import audit

ROWS = [
    # model, blocks, schedule, blocks_per_stage, mesh, placement, optimizer, options
    ("pytree", 7, "eager_one_f_one_b", None, {"data": 2, "pipeline": 2}, "ddp", "momentum", {}),
    (
        "pytree",
        7,
        "eager_one_f_one_b",
        None,
        {"data": 2, "tensor": 2, "pipeline": 2},
        "fsdp",
        "clip_adamw",
        {},
    ),
    (
        "pytree",
        7,
        "zero_bubble",
        (3, 4),
        {"data": 4, "pipeline": 2},
        "zero1",
        "adafactor",
        {"remat": True},
    ),
    (
        "pytree",
        5,
        "zero_bubble_v",
        (1, 0, 2, 2),
        {"data": 2, "pipeline": 2},
        "ddp",
        "clip_adamw",
        {},
    ),
    (
        "pytree",
        10,
        "interleaved",
        None,
        {"data": 2, "pipeline": 4},
        "fsdp",
        "momentum",
        {"remat": True},
    ),
    (
        "pytree",
        9,
        "zero_bubble_lockstep_2",
        None,
        {"replica": 2, "pipeline": 4},
        "zero1",
        "muon",
        {},
    ),
    ("gpt", 8, "one_f_one_b", (3, 2, 2, 1), {"data": 2, "pipeline": 4}, "zero2", "clip_adamw", {}),
    (
        "gpt",
        7,
        "gpipe",
        None,
        {"data": 2, "tensor": 2, "pipeline": 2},
        "fsdp_once",
        "clip_adamw",
        {},
    ),
    (
        "nnx",
        6,
        "dual_pipe_v",
        (2, 1, 1, 2),
        {"tensor": 2, "pipeline": 2},
        "zero1",
        "momentum",
        {"remat": True},
    ),
    ("nnx", 5, "looped_breadth_first", None, {"data": 4, "pipeline": 2}, "fsdp", "adafactor", {}),
    ("gpt", 9, "v_shaped", None, {"pipeline": 4}, "ddp", "clip_adamw", {"remat": True}),
]


@pytest.mark.parametrize(
    ("model", "blocks", "schedule", "counts", "sizes", "placement", "optimizer", "options"),
    tiered(
        ROWS,
        lambda row: row[5:7] == ("ddp", "momentum"),
        ids=lambda row: f"{row[0]}-{row[2]}-{row[5]}",
    ),
)
def test_equals_one_device(
    model, blocks, schedule, counts, sizes, placement, optimizer, options, mesh_of, x64
):
    case = block_problem(model, weighted=True, num_blocks=blocks, rows=16, steps=2)
    tx = OPTIMIZERS[optimizer]()
    opt = so.hybrid(
        tx,
        mesh_of(**{"data": 1} | sizes),
        case.loss_fn,
        schedule=SCHEDULES[schedule],
        micro_batches=4,
        blocks_per_stage=counts,
        placement=placement,
        rules=case.rules if "tensor" in sizes else (),
        min_shard_elements=8,
        **options,
    )
    trains_as_one_device(opt, case, tx)


WIDTH = 16
BLOCKS = 7
MICRO_BATCHES = 4
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["kernel"]) * w["scale"][None],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T) ** 2),
)


def params():
    draw = np.random.default_rng(0)
    blocks = {
        "kernel": draw.normal(size=(BLOCKS, WIDTH, WIDTH)) / 4,
        "scale": np.ones((BLOCKS, WIDTH)),
    }
    return jax.tree.map(jnp.float32, {"blocks": blocks, "in": draw.normal(size=(4, WIDTH))})


def make(mesh, model=MODEL, tx=None, **options):
    how = {"micro_batches": MICRO_BATCHES, "placement": "ddp", "min_shard_elements": 64} | options
    return so.hybrid(optax.sgd(0.1) if tx is None else tx, mesh, model, **how)


def test_uneven_stages_keep_the_users_leaves_and_send_the_stated_bytes(mesh_of):
    mesh = mesh_of(data=2, pipeline=2)
    opt = make(mesh)
    batch = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    state = opt.abstract_state(jax.eval_shape(params))
    kernel = state.params["blocks"]["kernel"]
    scale = state.params["blocks"]["scale"]
    assert kernel.shape == (BLOCKS, WIDTH, WIDTH)  # the user's own
    # the other dim is for data
    assert kernel.sharding.shard_shape(kernel.shape) == (BLOCKS, WIDTH, WIDTH // 2)
    assert scale.sharding.is_fully_replicated  # of a block fewer than min_shard_elements
    report = audit(opt.step.lower(state, batch).compile(), mesh=mesh)
    # two stages of room for 4: weights out by an all-to-all, gradients back by one; scale's
    # gradients by an all-gather
    sent = report.of(axis="pipeline", in_loop=False, kind="all-to-all")
    assert [collective.bytes for collective in sent.collectives] == [2 * 4 * WIDTH**2 // 2 * 4] * 2
    (gathered,) = report.of(axis="pipeline", in_loop=False, kind="all-gather").collectives
    assert gathered.bytes == 2 * 4 * WIDTH * 4


def test_a_stage_runs_its_own_blocks_and_no_others(mesh_of):
    """Counted on the host, forwards and backwards, in a program that has room for 3 blocks on each
    of 4 stages.
    """
    seen = Counter()

    def count(stage, x):
        seen[int(stage)] += 1
        return x

    def tell(x):
        def call(stage, x):
            return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), stage, x)

        wrapped = jax.shard_map(
            call, in_specs=None, out_specs=jax.P(), axis_names={"tensor"}, check_vma=False
        )
        return wrapped(jax.lax.axis_index("pipeline"), x)

    travelling = jax.custom_vjp(lambda x: tell(x))
    travelling.defvjp(lambda x: (tell(x), None), lambda _, dy: (tell(dy),))
    model = MODEL._replace(
        block=lambda w, x: travelling(x) + jnp.tanh(x @ w["kernel"]) * w["scale"][None]
    )
    counts = (3, 0, 3, 1)
    opt = make(
        mesh_of(data=1, pipeline=4),
        model,
        blocks_per_stage=counts,
        schedule=so.schedules.zero_bubble,
        view="unproved",
    )
    state, _ = opt.step(opt.init(params()), np.ones((8, 4), np.float32))
    jax.block_until_ready(state)
    assert seen == Counter({s: 2 * MICRO_BATCHES * n for s, n in enumerate(counts) if n})


OPTIMIZER = {
    "momentum": lambda: optax.sgd(0.003, momentum=0.9),
    "line search": lambda: optax.lbfgs(memory_size=2),
}


@pytest.mark.slow  # test_hybrid_checkpoints.py
@pytest.mark.parametrize("optimizer", tiered(OPTIMIZER, lambda name: name == "momentum"))
def test_a_run_goes_on_in_equal_stages_and_on_one_device(optimizer, mesh_of, tmp_path):
    """A line search differentiates evaluation, which skips blocks that are not there too."""
    tx = OPTIMIZER[optimizer]()
    uneven = make(mesh_of(data=1, pipeline=2), tx=tx, placement="fsdp")
    batches = np.random.default_rng(1).normal(size=(3, 16, 4)).astype(np.float32)
    state, _ = uneven.step(uneven.init(params()), batches[0])
    so.save(tmp_path, state)
    expected, _ = uneven.step(state, batches[1])
    optimizers = [make(mesh_of(data=4, pipeline=1), tx=tx)]
    if optimizer != "momentum":
        optimizers.append(make(mesh_of(data=1, pipeline=7), tx=tx, placement="zero1"))
    for opt in optimizers:
        opt.specs(jax.eval_shape(params))
        resumed_state, _ = opt.step(so.restore(tmp_path, opt), batches[1])
        assert relative_difference(resumed_state.params, jax.device_get(expected.params)) <= 1e-5
