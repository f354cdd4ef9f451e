"""A loop of one's own under shard_map: each device has its rows, and gradients are averaged."""

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
    tx = optimizer
    params, opt_state = weights, tx.init(weights)
    param_specs, state_specs = P(), P()

    def local_step(params, opt_state, batch):
        own = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        grads = jax.lax.pmean(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jax.lax.pmean(loss, "data")

    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(param_specs, state_specs, P("data")),
            out_specs=(param_specs, state_specs, P()),
        )
    )
    losses = []
    for batch in batches:
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return params, opt_state, losses


if __name__ == "__main__":
    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
