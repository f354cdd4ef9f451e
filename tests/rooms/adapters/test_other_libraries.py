"""Adapters on the weights of flax nnx, flax linen and haiku: a step equals plain jax on W + alpha /
rank A B.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax import nnx as flax_nnx
from support.tiers import tiered

import shardopt as so
from shardopt.adapters import lora
from shardopt.nn._low_rank import LowRank

RATE = 0.1
FACTOR = 3.0
DRAW = np.random.default_rng(0)
BATCH = {
    name: DRAW.normal(size=(16, size)).astype(np.float32) for name, size in (("x", 6), ("y", 3))
}


def of_nnx():
    class Net(flax_nnx.Module):
        def __init__(self, rngs):
            self.up = flax_nnx.Linear(6, 8, rngs=rngs)
            self.down = flax_nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    params, loss_fn, _ = so.interop.nnx(Net(flax_nnx.Rngs(0)), loss)
    return params, loss_fn, "kernel"


def of_linen():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="down")(jnp.tanh(linen.Dense(8, name="up")(x)))

    model = Net()
    params = model.init(jax.random.key(0), BATCH["x"])["params"]
    return (
        params,
        lambda params, batch: jnp.mean(
            (model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2
        ),
        "kernel$",
    )


def of_haiku():
    import haiku

    network = haiku.without_apply_rng(
        haiku.transform(lambda x: haiku.Linear(3)(jnp.tanh(haiku.Linear(8)(x))))
    )
    params = network.init(jax.random.key(0), BATCH["x"])
    return (
        params,
        lambda params, batch: jnp.mean((network.apply(params, batch["x"]) - batch["y"]) ** 2),
        "linear(_1)?/w$",
    )


def is_node(leaf):
    return isinstance(leaf, LowRank)


def expected(params, loss_fn):
    """Return A and B of each weight after a step of plain jax on one device."""
    nodes, tree = jax.tree.flatten(params, is_leaf=is_node)

    def loss(factors):
        pairs = iter(factors)
        merged = [
            node.base + FACTOR * jnp.matmul(*next(pairs)) if is_node(node) else node
            for node in nodes
        ]
        return loss_fn(tree.unflatten(merged), BATCH)

    factors = [(node.lora_a, node.lora_b) for node in nodes if is_node(node)]
    return jax.tree.map(
        lambda x, gradient: x - RATE * gradient, factors, jax.jit(jax.grad(loss))(factors)
    )


@pytest.mark.parametrize(
    "library", tiered([of_nnx, of_linen, of_haiku], lambda library: library is of_nnx)
)
def test_a_step_equals_plain_jax(library, mesh_of):
    weights, loss_fn, target = library()
    adapted = lora(loss_fn, rank=2, alpha=2 * FACTOR, targets=[target])

    def nonzero(node):
        return (
            LowRank(
                node.base,
                node.lora_a,
                0.1 + node.lora_b,
                matrix=node.matrix,
                scale=node.scale,
                dropout=0.0,
            )
            if is_node(node)
            else node
        )

    params = jax.tree.map(
        nonzero, jax.jit(adapted.init)(weights, jax.random.key(1)), is_leaf=is_node
    )
    after = expected(params, loss_fn)
    assert len(after) == 2
    opt = so.fsdp(
        optax.sgd(RATE), mesh_of(data=4), adapted.model, rules=adapted.rules, min_shard_elements=1
    )
    state, _ = opt.step(opt.init(params), BATCH)
    nodes = [node for node in jax.tree.leaves(state.params, is_leaf=is_node) if is_node(node)]
    for node, before, (lora_a, lora_b) in zip(
        nodes, filter(is_node, jax.tree.leaves(params, is_leaf=is_node)), after, strict=True
    ):
        assert np.abs(np.asarray(node.lora_a - before.lora_a)).max() > 1e-4
        np.testing.assert_allclose(node.lora_a, lora_a, rtol=0, atol=1e-6)
        np.testing.assert_allclose(node.lora_b, lora_b, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(node.base, before.base)
    merged = adapted.merge(state.params)
    assert jax.tree.structure(merged) == jax.tree.structure(weights)
    loss = jax.jit(loss_fn)(merged, BATCH)
    np.testing.assert_allclose(opt.evaluate(state, BATCH)["loss"], loss, rtol=1e-5)
