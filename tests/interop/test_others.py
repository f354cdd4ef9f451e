"""Models of others, as their users write them, take the steps that they take on one device."""

import re

import jax
import numpy as np
import optax
import pytest
from support.others import MODELS
from support.tiers import tiered

import shardopt as so
from shardopt.core.block_model import takes_rng
from shardopt.core.types import leaves_with_paths

STEPS, TOLERANCE = 3, 2e-5
KEY = 7
# A gradient of zero but for rounding (that of a bias before a batch norm) must not become a whole step.
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
MIXING = {name for name, make in MODELS.items() if name in ("ppo",)}


def alone(tx, case, batches):
    """Return losses and parameters of one device in plain jax, which keeps `Updated` values and draws the same keys."""
    paths = [path for path, _ in leaves_with_paths(case.params)]
    leaves, treedef = jax.tree.flatten(case.params)
    trained = [
        np.issubdtype(leaf.dtype, np.floating) and not any(re.search(one, path) for one in case.frozen)
        for path, leaf in zip(paths, leaves, strict=True)
    ]

    def merge(part, leaves):
        new = iter(part)
        return treedef.unflatten([next(new) if one else x for one, x in zip(trained, leaves, strict=True)])

    @jax.jit
    def step(leaves, opt_state, batch, number):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(KEY), 0), number)
        for index in (0, 0, 0):  # the device's, the micro-batch's, the loss's
            key = jax.random.fold_in(key, index)

        def loss_of(part):
            rng = {"rng": key} if takes_rng(case.loss_fn) else {}
            returned = case.loss_fn(merge(part, leaves), batch, **rng)
            is_pair = isinstance(returned, tuple) and not isinstance(returned, so.Weighted)
            loss, aux = returned if is_pair else (returned, {})
            loss = loss.total / loss.weight if isinstance(loss, so.Weighted) else loss
            updated = [value.values for value in aux.values() if isinstance(value, so.Updated)]
            return loss, {path: leaf for tree in updated for path, leaf in leaves_with_paths(tree)}

        part = [x for one, x in zip(trained, leaves, strict=True) if one]
        (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(part)
        updates, opt_state = tx.update(grads, opt_state, part)
        merged = jax.tree.leaves(merge(optax.apply_updates(part, updates), leaves))
        return [updated.get(path, x) for path, x in zip(paths, merged, strict=True)], opt_state, loss

    opt_state, losses = tx.init([x for one, x in zip(trained, leaves, strict=True) if one]), []
    for number, batch in enumerate(batches):
        leaves, opt_state, loss = step(leaves, opt_state, batch, number)
        losses.append(float(loss))
    return losses, treedef.unflatten(leaves)


def compare(opt, case):
    batches = case.batches(STEPS)
    losses, params = alone(TX, case, batches)
    state, found = opt.init(case.params, jax.random.key(KEY)), []
    for batch in batches:
        state, metrics = opt.step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=TOLERANCE)
    for (path, one), other in zip(leaves_with_paths(jax.device_get(state.params)), jax.tree.leaves(params), strict=True):
        scale = max(0.1, np.max(np.abs(other)))  # some gradients are zero but for rounding: of keys' biases in attention
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * scale, err_msg=path)
    return state


ROWS = [(name, strategy) for name in MODELS for strategy in ("ddp", "fsdp")]
QUICK = [("haiku_transformer", "ddp")]


@pytest.mark.parametrize(("name", "strategy"), tiered(ROWS, lambda row: row in QUICK))
def test_it_trains_as_on_one_device(name, strategy, mesh_of):
    case = MODELS[name]()
    options = {"view": "global"} if case.mixing else {}
    options |= {"min_shard_elements": 1} if strategy == "fsdp" else {}
    compare(getattr(so, strategy)(TX, mesh_of(data=8), case.loss_fn, frozen=case.frozen, **options), case)
