"""Batch normalisation over the whole batch, for flax linen and nnx, haiku and equinox: as their own
layer on one device.

Each class is its library's layer with other moments; a model that has the library's takes this one
instead, checkpoints included. On one device they are the same."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support.tiers import tiered

import shardopt as so

X = np.linspace(0.2, 2.0, 16)[:, None] * np.random.default_rng(0).normal(size=(16, 6))


def moments(x):
    """Mean and variance of each feature over the rows of the whole batch, and over positions where
    there are any.
    """
    x = x.reshape(len(x), -1, x.shape[-1])
    mean = so.losses.batch_mean(x.mean(1))
    return mean, so.losses.batch_mean(((x - mean[None, None]) ** 2).mean(1))


def normalised(x, mean, var, scale, bias, epsilon):
    mean, var, scale, bias = (
        vector.reshape((1,) * (x.ndim - 1) + (-1,)) for vector in (mean, var, scale, bias)
    )
    return (x - mean) * jax.lax.rsqrt(var + epsilon) * scale + bias


class LinenBatchNorm(linen.BatchNorm):
    @linen.compact
    def __call__(self, x, use_running_average=None):
        size = x.shape[-1:]
        mean = self.variable("batch_stats", "mean", jnp.zeros, size)
        var = self.variable("batch_stats", "var", jnp.ones, size)
        scale = self.param("scale", self.scale_init, size)
        bias = self.param("bias", self.bias_init, size)
        if linen.merge_param("use_running_average", self.use_running_average, use_running_average):
            return normalised(x, mean.value, var.value, scale, bias, self.epsilon)
        now = moments(x)
        if not self.is_initializing():
            for variable, new in zip((mean, var), now, strict=True):
                variable.value = self.momentum * variable.value + (1 - self.momentum) * new
        return normalised(x, *now, scale, bias, self.epsilon)


class NnxBatchNorm(nnx.BatchNorm):
    def __call__(self, x, use_running_average=None):
        if self.use_running_average if use_running_average is None else use_running_average:
            return super().__call__(x, use_running_average)
        now = moments(x)
        for variable, new in zip((self.mean, self.var), now, strict=True):
            variable[...] = self.momentum * variable[...] + (1 - self.momentum) * new
        return normalised(x, *now, self.scale[...], self.bias[...], self.epsilon)


class HaikuBatchNorm(hk.BatchNorm):
    def __call__(self, x, is_training):
        size = (1,) * (x.ndim - 1) + x.shape[-1:]
        scale = hk.get_parameter("scale", size, x.dtype, jnp.ones)
        bias = hk.get_parameter("offset", size, x.dtype, jnp.zeros)
        if not is_training:
            return normalised(x, self.mean_ema.average, self.var_ema.average, scale, bias, self.eps)
        now = moments(x)
        for moving_average, new in zip((self.mean_ema, self.var_ema), now, strict=True):
            moving_average(new.reshape(size))
        return normalised(x, *now, scale, bias, self.eps)


class EquinoxBatchNorm(eqx.Module):
    """Called with all rows, where equinox's own is called with one, under vmap."""

    weight: jax.Array
    bias: jax.Array
    statistics: eqx.nn.StateIndex

    def __init__(self, size):
        self.weight = jnp.ones(size)
        self.bias = jnp.zeros(size)
        self.statistics = eqx.nn.StateIndex((jnp.zeros(size), jnp.ones(size)))

    def __call__(self, x, state, *, inference=False):
        before = state.get(self.statistics)
        if inference:
            return normalised(x, *before, self.weight, self.bias, 1e-5), state
        now = moments(x)
        after = tuple(0.9 * old + 0.1 * new for old, new in zip(before, now, strict=True))
        return normalised(x, *now, self.weight, self.bias, 1e-5), state.set(self.statistics, after)


def linen_model(is_custom):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(8)(x)
            x = (LinenBatchNorm if is_custom else linen.BatchNorm)(
                use_running_average=False, momentum=0.9, name="norm"
            )(x)
            return linen.Dense(2)(jnp.tanh(x))

    variables = jax.jit(Net().init)(jax.random.key(0), X)

    def forward(params, stats, x):
        y, new = Net().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return y, new["batch_stats"]

    return variables["params"], variables["batch_stats"], forward


def nnx_model(is_custom):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(6, 8, rngs=rngs)
            self.down = nnx.Linear(8, 2, rngs=rngs)
            self.norm = (NnxBatchNorm if is_custom else nnx.BatchNorm)(8, momentum=0.9, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.norm(self.up(x))))

    graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def forward(params, stats, x):
        net = nnx.merge(graph, params, stats, copy=True)
        return net(x), nnx.state(net, nnx.BatchStat)

    return params, stats, forward


def haiku_model(is_custom):
    def net(x):
        norm = (HaikuBatchNorm if is_custom else hk.BatchNorm)(True, True, 0.9, name="norm")
        return hk.Linear(2)(jnp.tanh(norm(hk.Linear(8)(x), is_training=True)))

    net = hk.without_apply_rng(hk.transform_with_state(net))
    return *jax.jit(net.init)(jax.random.key(0), X), net.apply


def equinox_model(is_custom):
    class Net(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        norm: eqx.Module

        def __init__(self, key):
            self.up = eqx.nn.Linear(6, 8, key=key)
            self.down = eqx.nn.Linear(8, 2, key=key)
            self.norm = (
                EquinoxBatchNorm(8)
                if is_custom
                else eqx.nn.BatchNorm(8, "rows", momentum=0.9, mode="batch")
            )

        def __call__(self, x, state):
            x = jax.vmap(self.up)(x)
            if is_custom:
                x, state = self.norm(x, state)
            else:
                x, state = jax.vmap(
                    self.norm, axis_name="rows", in_axes=(0, None), out_axes=(0, None)
                )(x, state)
            return jax.vmap(self.down)(jnp.tanh(x)), state

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static_part = eqx.partition(net, eqx.is_array)
    return params, state, lambda params, state, x: eqx.combine(params, static_part)(x, state)


@pytest.mark.parametrize(
    "model",
    tiered(
        [linen_model, nnx_model, haiku_model, equinox_model],
        lambda model: False,
        ids=lambda model: model.__name__,
    ),
)
def test_equals_the_librarys_own_layer_on_one_device(model, mesh_of, x64):
    def wide(tree):
        return jax.tree.map(lambda x: x.astype(float) if x.dtype.kind == "f" else x, tree)

    def loss_of(forward):
        def loss_fn(held, x):
            y, stats = forward(held["params"], held["stats"], x)
            return jnp.mean((y - x[:, :2]) ** 2), {"stats": so.losses.Updated({"stats": stats})}

        return loss_fn

    params, stats, forward = model(is_custom=False)
    params = wide(params)
    stats = wide(stats)
    differences = []
    custom_model = model(is_custom=True)
    grad = jax.jit(
        jax.value_and_grad(
            lambda *args: loss_of(forward)({"params": args[0], "stats": args[1]}, args[2]),
            has_aux=True,
        )
    )
    opt = so.fsdp(
        optax.sgd(0.1),
        mesh_of(replica=2, data=2),
        loss_of(custom_model[2]),
        rules=[("^stats", "frozen")],
    )
    state = opt.init({"params": wide(custom_model[0]), "stats": wide(custom_model[1])})
    for batch in (X, X[::-1] ** 2, X + 1):
        (loss, aux), grads = grad(params, stats, batch)
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
        stats = aux["stats"].values["stats"]
        state, metrics = opt.step(state, batch)
        differences.append(abs(metrics["loss"] - loss))
    assert max(differences) < 1e-9

    def check(differences, expected):
        return np.testing.assert_allclose(differences, expected, rtol=1e-8, atol=1e-10)

    jax.tree.map(check, jax.tree.leaves(state.params["params"]), jax.tree.leaves(params))
    if model is not equinox_model:  # which counts its averages otherwise
        jax.tree.map(check, jax.tree.leaves(state.params["stats"]), jax.tree.leaves(stats))
