"""Hybrid equals one device on the union batch: every pair of schedule, placement, mesh, sizes,
optimizer and model.

Every run has a schedule of forward and backward passes in turn, one with a split backward pass, two
placements, and replicas. All other rows are slow."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.pairwise import all_pairs, lighten
from support.pipelines import BLOCK_MODELS, MICRO_BATCHES, SCHEDULES, block_problem, micro_batches
from support.problems import Problem
from support.reference import OPTIMIZERS, trains_as_one_device
from support.tiers import tiered

import shardopt as so

MESHES = [
    {"data": 2, "tensor": 2, "pipeline": 2},
    {"tensor": 2, "pipeline": 4},
    {"data": 2, "pipeline": 4},
    {"pipeline": 8},
    {"data": 4, "pipeline": 2},
    {"replica": 2, "data": 2, "pipeline": 2},
]
LATER = ("zero_bubble_v_ahead",)
FACTORS = {
    "schedule": [name for name in SCHEDULES if name not in LATER],
    "placement": ["ddp", "zero1", "zero2", "fsdp"],
    "mesh": MESHES,
    "micro_batches": list(MICRO_BATCHES),
    "optimizer": ["momentum", "clip_adamw", "muon", "adafactor"],
    "weighted": [False, True],
    "remat": [False, True],
    "model": list(BLOCK_MODELS),
}
ROWS = lighten(lighten(all_pairs(FACTORS), "model", "pytree"), "remat", False)

ROWS_OF_LATER = [
    row | {"schedule": name}
    for name, like in zip(LATER, ("zero_bubble_v",), strict=True)
    for row in ROWS
    if row["schedule"] == like and row["micro_batches"] in ("odd", "fewer")
]

QUICK = [
    next(
        row
        for row in ROWS
        if row["model"] == "pytree" and (row["schedule"], row["placement"]) == pair
    )
    for pair in [
        ("eager_one_f_one_b", "fsdp"),
        ("zero_bubble", "zero1"),
    ]
]
FAST = QUICK[:1]


def row_id(row) -> str:
    mesh = ",".join(f"{axis}{size}" for axis, size in row["mesh"].items())
    words = [
        row["schedule"],
        row["placement"],
        mesh,
        row["micro_batches"],
        row["optimizer"],
        row["model"],
    ]
    return "-".join(
        [*words, *(["weighted"] if row["weighted"] else []), *(["remat"] if row["remat"] else [])]
    )


def problem_of(row):
    """Return the blocks of a row, and the number of its micro-batches."""
    sizes = {"data": 1} | row["mesh"]
    stages = sizes["pipeline"]
    count = micro_batches(row["schedule"], row["micro_batches"], stages)
    devices = sizes["data"] * sizes.get("replica", 1)
    num_blocks = 16 if stages == 8 else 8
    case = block_problem(
        row["model"], weighted=row["weighted"], num_blocks=num_blocks, rows=2 * count * devices
    )
    return case, count


def strategy_of(row, case, count, tx, mesh):
    return so.hybrid(
        tx,
        mesh,
        case.loss_fn,
        schedule=SCHEDULES[row["schedule"]],
        micro_batches=count,
        placement=row["placement"],
        rules=case.rules if "tensor" in row["mesh"] else (),
        min_shard_elements=8,
        remat=row["remat"],
    )


@pytest.mark.parametrize(
    "row",
    tiered(
        ROWS + ROWS_OF_LATER, lambda row: row in QUICK, fast=lambda row: row in FAST, ids=row_id
    ),
)
def test_equals_one_device_on_the_union_batch(row, mesh_of, x64):
    case, count = problem_of(row)
    tx = OPTIMIZERS[row["optimizer"]]()
    opt = strategy_of(row, case, count, tx, mesh_of(**{"data": 1} | row["mesh"]))
    trains_as_one_device(opt, case, tx)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("schedule", ["eager_one_f_one_b", "zero_bubble_v"])
def test_steps_with_residuals_that_fill_tiles_equal_one_device(schedule, remat, mesh_of, x64):
    """The step tells the compiler their layout, which passes through the partitioner of tensor."""
    draw = np.random.default_rng(3)

    def leaf(*shape):
        return draw.normal(size=shape) / shape[-2] ** 0.5

    params = {"blocks": {"up": leaf(8, 128, 256), "down": leaf(8, 256, 128)}, "in": leaf(4, 128)}
    model = so.BlockModel(
        embed=lambda outer, batch: batch @ outer["in"],
        block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
        loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T) ** 2),
    )
    rules = [("up", P(None, "tensor")), ("down", P("tensor"))]
    case = Problem(
        params, model, model.loss_fn, rules, [draw.normal(size=(64, 4)) for _ in range(2)]
    )
    tx = optax.sgd(1e-3)
    how = {
        "schedule": SCHEDULES[schedule],
        "micro_batches": 4,
        "placement": "ddp",
        "rules": rules,
        "remat": remat,
    }
    opt = so.hybrid(tx, mesh_of(data=2, tensor=2, pipeline=2), model, **how)
    trains_as_one_device(opt, case, tx)


def test_the_rows_cover_every_pair():
    for a, b in itertools.combinations(FACTORS, 2):
        seen = {(str(row[a]), str(row[b])) for row in ROWS}
        assert len(seen) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)
    assert len(ROWS) < math.prod(map(len, FACTORS.values())) / 100


@pytest.mark.slow
def test_the_problems_tell_devices_apart():
    """Rows of the first device must not stand for all: or forgetting a reduction would not show."""
    with jax.enable_x64(True):
        for name in BLOCK_MODELS:
            case = block_problem(name, weighted=True, num_blocks=4, rows=8, steps=1)
            half = jax.tree.map(lambda x: x[:4], case.batches[0])
            full_grads, other = (
                jax.grad(case.reference, allow_int=True)(case.params, b)
                for b in (case.batches[0], half)
            )
            leaves = [
                (a, b)
                for a, b in zip(*map(jax.tree.leaves, (full_grads, other)), strict=True)
                if a.dtype == float
            ]
            assert max(float(abs(a - b).max()) for a, b in leaves) > 1e-3
