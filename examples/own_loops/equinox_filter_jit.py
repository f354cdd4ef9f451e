"""A loop of equinox, whose filter_shard places model and state on all devices, as its example."""

import data
import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


class Model(eqx.Module):
    up: jax.Array
    down: jax.Array
    name: str = "mlp"

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down


def train(optimizer, weights, batches):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    model = Model(jnp.asarray(weights["up"]), jnp.asarray(weights["down"]))
    tx = optimizer
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        model, opt_state = eqx.filter_shard((model, opt_state), replicated)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        model, opt_state = eqx.filter_shard((model, opt_state), replicated)
        return model, opt_state, loss

    losses = []
    for batch in batches:
        batch = eqx.filter_shard(batch, split)
        model, opt_state, loss = make_step(model, opt_state, batch)
        losses.append(loss)
    return {"up": model.up, "down": model.down}, opt_state, losses


if __name__ == "__main__":
    import optax

    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
