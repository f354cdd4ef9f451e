"""`hybrid(placement="fsdp_once")`: blocks that are gathered once a step equal one device. They send
weights once a step, where `fsdp` sends them in every pass, and hold them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.pipelines import SCHEDULES, block_problem
from support.reference import OPTIMIZERS, relative_difference, train
from support.tiers import tiered
from support.traffic import Expected, check_traffic

import shardopt as so
from shardopt.hlo import audit

LAYERS = 8
WIDTH = 64
ROWS = 32
MICRO_BATCHES = 4
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]),
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T) ** 2),
)
PARAMS = {
    "blocks": {"up": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)},
    "in": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
SIZES = {"data": 2, "pipeline": 4}
ROWS_OF_TABLE = [
    ("pytree", "interleaved", {"data": 2, "pipeline": 2}, False),
    ("pytree", "interleaved", {"data": 2, "tensor": 2, "pipeline": 2}, False),
    ("pytree", "zero_bubble_v", {"data": 2, "pipeline": 4}, True),
    ("gpt", "zero_bubble", {"replica": 2, "data": 2, "pipeline": 2}, False),
]


@pytest.mark.parametrize(
    ("model", "schedule", "sizes", "remat"),
    tiered(ROWS_OF_TABLE, lambda row: len(row[2]) == 2 and not row[3]),
)
def test_equals_one_device(model, schedule, sizes, remat, mesh_of, x64):
    case = block_problem(model, weighted=True, num_blocks=8, rows=16, steps=2)
    tx = OPTIMIZERS["clip_adamw"]()
    opt = so.hybrid(
        tx,
        mesh_of(**sizes),
        case.loss_fn,
        schedule=SCHEDULES[schedule],
        micro_batches=4,
        rules=case.rules if "tensor" in sizes else (),
        min_shard_elements=8,
        remat=remat,
        placement="fsdp_once",
    )
    expected, final = train(tx, case.reference, case.params, case.batches)
    state = opt.init(case.params)
    np.testing.assert_allclose(
        opt.evaluate(state, case.batches[0])["loss"], expected[0][0], rtol=1e-10
    )
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-10


def make(mesh, **options):
    how = {
        "schedule": so.schedules.eager_one_f_one_b,
        "micro_batches": MICRO_BATCHES,
        "min_shard_elements": 8,
    }
    return so.hybrid(optax.sgd(0.1), mesh, MODEL, **how, **options)


def test_blocks_gathered_once_send_once_and_are_held(mesh_of):
    mesh = mesh_of(**SIZES)
    stage = 4 * WIDTH**2 * LAYERS // SIZES["pipeline"]
    once, regathering, zero1 = (
        make(mesh, **options)
        for options in ({"placement": "fsdp_once"}, {}, {"placement": "zero1"})
    )
    compiled = [
        opt.step.lower(opt.abstract_state(PARAMS), BATCH).compile()
        for opt in (once, regathering, zero1)
    ]
    report = audit(compiled[0], mesh=mesh)
    outer = 4 * WIDTH**2
    ticks = once.config.schedule.num_ticks
    activation = 4 * ROWS // SIZES["data"] // MICRO_BATCHES * WIDTH
    check_traffic(
        report,
        [
            Expected(
                "collective-permute", "pipeline", 2 * ticks * activation, 2 * ticks, in_loop=True
            ),
            Expected("all-gather", "data", stage + outer, in_loop=False),
            Expected("reduce-scatter", "data", stage + outer, in_loop=False),
            Expected("all-reduce", "pipeline", outer // SIZES["data"]),
        ],
        min_bytes=64,
        rtol=0.01,
    )
    assert not report.of(axis="data", in_loop=True).collectives
    held, temporary = zip(
        *(
            (
                program.memory_analysis().argument_size_in_bytes,
                program.memory_analysis().temp_size_in_bytes,
            )
            for program in compiled
        ),
        strict=True,
    )
    assert held[0] == held[1] < held[2]  # between steps: only shards, also of the parameters
    # all weights of a stage, and its unsharded gradients, less one block that is gathered and
    # scattered in turn
    assert stage <= temporary[0] - temporary[1] <= 2.5 * stage
    assert temporary[0] - temporary[2] <= 1.6 * stage  # zero1 keeps the weights anyway


@pytest.mark.parametrize(
    ("options", "sizes", "error", "message"),
    [
        (
            {"placement": "fsdp_once"},
            {"data": 8, "pipeline": 1},
            ValueError,
            (
                "hybrid: placement='fsdp_once' is for pipelines, and there is one stage.\n"
                "Fix: use a mesh with pipeline above 1, or placement='fsdp'."
            ),
        ),
    ],
)
def test_bad_input_is_refused(options, sizes, error, message, mesh_of):
    with pytest.raises(error) as caught:
        make(mesh_of(**sizes), **options)
    assert str(caught.value) == message
