"""Collectives that the partitioner puts inside a block must not wait for stages that do something
else.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.pipelines import SCHEDULES
from support.tiers import tiered

import shardopt as so
from shardopt.hlo import audit

SHAPES = {"blocks": {"up": (4, 8, 16), "down": (4, 8, 8), "wide": (4, 16, 8)}, "in": (8, 8)}
PARAMS = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]


def gated(w, x):
    """Gate and value in one product, taken apart by a split of the dim that lies over tensor."""
    gate, value = jnp.split(x @ w["up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * value) @ w["down"]


def rotated(w, x):
    h = x @ w["up"]
    return x + (h + jnp.concatenate([-h[:, 8:], h[:, :8]], axis=-1)) @ w["wide"]


def rolled(w, x):
    return x + jnp.roll(x @ w["up"], 1, axis=-1) @ w["wide"]


MESSAGE = """hybrid: the partitioner moves data over tensor by permutes inside of stages, which other stages never come to.
  {place}
Fix: do not shift, cut or join a dim that a rule splits over tensor: give gate and value, or halves, a dim or a weight \
of their own (as shardopt/nn/_memory_layout.py does), or change the rule."""


def hybrid(block, mesh):
    model = so.BlockModel(
        embed=lambda outer, batch: batch @ outer["in"],
        block=block,
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    return so.hybrid(
        optax.sgd(0.1),
        mesh,
        model,
        schedule=SCHEDULES["eager_one_f_one_b"],
        micro_batches=4,
        placement="ddp",
        rules=RULES,
    )


@pytest.mark.parametrize("block", tiered([gated, rotated, rolled], lambda block: block is rolled))
def test_a_permute_in_a_branch_is_refused_before_anything_runs(block, mesh_of):
    """A collective permute has no groups: on CPU every device has to come to it, and idle stages do
    not.
    """
    opt = hybrid(block, mesh_of(data=2, tensor=2, pipeline=2))
    state = opt.init(jax.tree.map(lambda item: jnp.ones(item.shape), PARAMS))
    with pytest.raises(
        ValueError, match=r"^hybrid: the partitioner moves data over tensor by permutes"
    ) as error:
        opt.step(state, jnp.ones((16, 8)))
    head, *places, fix = str(error.value).splitlines()
    assert (head, fix) == (MESSAGE.splitlines()[0], MESSAGE.splitlines()[-1])
    assert places
    assert all(place.startswith("  ") for place in places)
    assert not state.step.is_deleted()
    report = audit(opt.step, state, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    assert [item for item in report.of(kind="collective-permute").collectives if item.conditional]


@pytest.mark.slow
def test_a_block_that_keeps_to_its_shards_runs(mesh_of):
    def block(w, x):
        return x + jax.nn.silu(x @ w["up"]) @ w["wide"]

    opt = hybrid(block, mesh_of(data=2, tensor=2, pipeline=2))
    state = opt.init(jax.tree.map(lambda leaf: jnp.ones(leaf.shape) / 16, PARAMS))
    first = float(opt.evaluate(state, jnp.ones((16, 8)))["loss"])
    state, metrics = opt.step(state, jnp.ones((16, 8)))
    assert float(metrics["loss"]) == pytest.approx(first)
    assert float(opt.evaluate(state, jnp.ones((16, 8)))["loss"]) < first
