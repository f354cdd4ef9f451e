"""A loop under jit with shardings for everything that goes in and out, as openpi's."""

from typing import Any, NamedTuple

import data
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


class State(NamedTuple):
    params: Any
    opt_state: Any


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def train(optimizer, weights, batches):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    tx = optimizer
    state_sharding = State(params=replicated, opt_state=replicated)

    def init(params):
        return State(params, tx.init(params))

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    init = jax.jit(init, out_shardings=state_sharding)
    step = jax.jit(
        step,
        in_shardings=(state_sharding, split),
        out_shardings=(state_sharding, replicated),
        donate_argnums=(0,),
    )
    state, losses = init(weights), []
    for batch in batches:
        state, loss = step(state, jax.device_put(batch, split))
        losses.append(loss)
    return state.params, state.opt_state, losses


if __name__ == "__main__":
    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
