"""A loop of flax nnx with a TrainState, under jit, as flax's mnist example."""

import data
import jax
import jax.numpy as jnp
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


class Model(nnx.Module):
    def __init__(self, weights):
        self.up = nnx.Param(jnp.asarray(weights["up"]))
        self.down = nnx.Param(jnp.asarray(weights["down"]))

    def __call__(self, x):
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def train(optimizer, weights, batches):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    graph, params = nnx.split(Model(weights))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    tx = optimizer
    state = TrainState.create(apply_fn=graph, params=params, tx=tx)

    def loss_fn(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for batch in batches:
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        state, loss = train_step(state, batch)
        losses.append(loss)
    return nnx.to_pure_dict(state.params), state.opt_state, losses


if __name__ == "__main__":
    import optax

    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
