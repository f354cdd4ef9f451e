"""A loop under jit with a dict as state, and clipping before the optimizer, as big_vision's."""

import data
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def train(optimizer, weights, batches):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    tx = optimizer
    params = jax.device_put(weights, replicated)
    train_state = {"params": params, "opt": jax.jit(tx.init)(params)}

    def update_fn(train_state, batch):
        params, opt = train_state["params"], train_state["opt"]
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt": opt}, {"training_loss": loss}

    update_fn = jax.jit(update_fn, donate_argnums=(0,))
    losses = []
    for batch in batches:
        batch = jax.device_put(batch, split)
        train_state, measurements = update_fn(train_state, batch)
        losses.append(measurements["training_loss"])
    return train_state["params"], train_state["opt"], losses


if __name__ == "__main__":
    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
