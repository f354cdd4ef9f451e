"""A loop of haiku with a hand-written state, under pmap, as haiku's imagenet example."""

import functools
from typing import Any, NamedTuple

import data
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax


class State(NamedTuple):
    params: Any
    opt_state: Any


def train(optimizer, weights, batches):
    def forward(x):
        up = hk.get_parameter("up", (16, 32), init=lambda *_: weights["up"])
        down = hk.get_parameter("down", (32, 8), init=lambda *_: weights["down"])
        return jnp.tanh(x @ up) @ down

    net = hk.without_apply_rng(hk.transform(forward))
    tx = optimizer

    def loss_fn(params, batch):
        return jnp.mean((net.apply(params, batch["x"]) - batch["y"]) ** 2)

    @functools.partial(jax.pmap, axis_name="i")
    def init(batch):
        params = net.init(jax.random.key(0), batch["x"])
        return State(params, tx.init(params))

    @functools.partial(jax.pmap, axis_name="i")
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        grads = jax.lax.pmean(grads, "i")
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), jax.lax.pmean(loss, "i")

    losses, state = [], None
    for batch in batches:
        batch = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        state = init(batch) if state is None else state
        state, loss = train_step(state, batch)
        losses.append(np.asarray(loss)[0])
    return jax.tree.map(lambda x: x[0], state.params["~"]), state.opt_state, losses


if __name__ == "__main__":
    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
