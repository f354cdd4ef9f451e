"""Dropout as flax, equinox and haiku make its keys: the proof accepts it, so each device draws by
itself.
"""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardopt as so

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)}


def squares(x):
    return jnp.mean(x**2)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.Dropout(0.2, deterministic=False)(linen.Dense(6)(x)), None


def linen_scan():
    layers = linen.scan(
        LinenBlock,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=3,
    )()
    params = layers.init(jax.random.key(0), BATCH["x"], None)

    def loss(params, batch, rng):
        return squares(layers.apply(params, batch["x"], None, rngs={"dropout": rng})[0])

    return params, loss


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 6, dropout_rate=0.1, rngs=rngs, decode=False, deterministic=False
        )
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.attention(self.dropout(self.linear(x))[:, None])


def nnx_streams():
    params, loss, _ = so.interop.nnx(NnxNet(nnx.Rngs(0)), lambda net, b: squares(net(b["x"])))
    return params, loss


def equinox_rows():
    linear = eqx.nn.Linear(6, 6, key=jax.random.key(0))
    dropout = eqx.nn.Dropout(0.2)

    def loss(linear, batch, rng):
        keys = jax.random.split(rng, batch["x"].shape[0])
        return squares(jax.vmap(lambda x, key: dropout(linear(x), key=key))(batch["x"], keys))

    return linear, loss


def haiku_keys():
    def net(x):
        return hk.dropout(
            hk.next_rng_key(), 0.2, hk.Linear(6)(hk.dropout(hk.next_rng_key(), 0.1, x))
        )

    transformed = hk.transform(net)

    def loss(params, batch, rng):
        return squares(transformed.apply(params, rng, batch["x"]))

    return transformed.init(jax.random.key(0), BATCH["x"]), loss


@pytest.mark.parametrize("network", [linen_scan, nnx_streams, equinox_rows, haiku_keys])
def test_each_device_draws_its_masks(network, mesh_of):
    params, loss = network()
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss, micro_batches=2, view="per_device")
    state, _ = opt.step(opt.init(params, jax.random.key(1)), BATCH)  # refused without a proof
    assert state.step == 1
