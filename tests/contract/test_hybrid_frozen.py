"""Frozen blocks cost no weight pass. If the leaves before them are frozen too, they cost no
backward pass.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.hlo import inner_product_flops

WIDTH = 64
BLOCKS = 8
ROWS = 64
MICRO_BATCHES = 8
STAGES = 4
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["kernel"]),
    loss=lambda outer, x, batch: jnp.mean((x @ outer["out"]) ** 2),
)
SHAPES = {"blocks": {"kernel": (BLOCKS, WIDTH, WIDTH)}, "in": (2, WIDTH), "out": (WIDTH, 2)}
PARAMS = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)


@pytest.mark.parametrize(
    ("frozen", "passes"),
    # test_hybrid_memory.py counts the three passes of blocks that are not frozen too
    tiered([((), 3), (("^blocks",), 2), (("^blocks", "^in"), 1)], lambda row: row[1] < 3, ids=str),
)
def test_frozen_blocks_skip_passes_that_nobody_reads(frozen, passes, mesh_of):
    opt = so.hybrid(
        optax.sgd(0.1),
        mesh_of(data=2, pipeline=STAGES),
        MODEL,
        schedule=so.schedules.zero_bubble,
        micro_batches=MICRO_BATCHES,
        placement="ddp",
        rules=[(pattern, "frozen") for pattern in frozen],
    )
    batch = jax.ShapeDtypeStruct((ROWS, 2), jnp.float32)
    compiled = opt.step.lower(opt.abstract_state(PARAMS), batch).compile()
    flops = inner_product_flops(compiled, schedule=opt.config.schedule)
    one_pass = 2 * (ROWS // 2) * (BLOCKS // STAGES) * WIDTH**2
    # and the ends of the model, which are small
    assert flops == pytest.approx(passes * one_pass, rel=0.1)
