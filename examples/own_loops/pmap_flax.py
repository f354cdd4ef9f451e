"""A loop of flax with a replicated TrainState, under pmap, as flax's imagenet example."""

import functools

import data
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training.train_state import TrainState


def apply(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def train(optimizer, weights, batches):
    params = jax.tree.map(jnp.asarray, weights)
    tx = optimizer
    state = TrainState.create(apply_fn=apply, params=params, tx=tx)
    state = jax_utils.replicate(state)

    @functools.partial(jax.pmap, axis_name="batch")
    def train_step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        grads = jax.lax.pmean(grads, "batch")
        return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")

    losses = []
    for batch in batches:
        batch = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        state, loss = train_step(state, batch)
        losses.append(np.asarray(loss)[0])
    return jax_utils.unreplicate(state.params), state.opt_state, losses


if __name__ == "__main__":
    import optax

    print(train(optax.adamw(1e-2), data.weights(), data.batches())[2])
