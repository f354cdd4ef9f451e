"""Models as pairs of functions (init, apply), haiku's for one: their params are plain dicts, rules
search their paths.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from support.reference import jitted

import shardopt as so


def test_a_haiku_model_trains_split_as_on_one_device(mesh_of):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 8], name="net")(x)))
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean(net.apply(params, batch) ** 2)

    tx = optax.sgd(0.1, momentum=0.9)
    rules = [("linear_0/w", P(None, "tensor")), ("linear_1/w", P("tensor"))]
    opt = so.zero(
        tx, mesh_of(data=2, tensor=2), loss_fn, stage=1, rules=rules, min_shard_elements=1
    )
    state = opt.init(lambda rng: net.init(rng, x), jax.random.key(3))
    reference = jax.jit(net.init)(jax.random.key(3), x)
    tx = jitted(tx)
    moments = tx.init(reference)
    gradient = jax.jit(jax.grad(loss_fn))
    for _ in range(3):
        state, _ = opt.step(state, x)
        updates, moments = tx.update(gradient(reference, x), moments, reference)
        reference = optax.apply_updates(reference, updates)
    assert sorted(state.params) == ["net/~/linear_0", "net/~/linear_1"]
    assert state.params["net/~/linear_0"]["w"].sharding.spec == P(None, "tensor")
    for trained_leaf, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(reference), strict=True
    ):
        np.testing.assert_allclose(trained_leaf, other, rtol=2e-5, atol=2e-6)
