"""Local SGD and DiLoCo written from their equations: replicas in a list, numpy for what crosses
between them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

NESTEROV = {"rate": 0.7, "momentum": 0.9, "nesterov": True}


def own_batches(batch, replicas):
    """Cut a global batch into the replicas' rows."""
    return [
        jax.tree.map(lambda x, i=i: np.split(np.asarray(x), replicas)[i], batch)
        for i in range(replicas)
    ]


def fragment_masks(params, count, stages=1):
    """Return P trees of 0 and 1: blocks f, f + P, ... of each stage, other leaves dealt out in
    turn.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves, treedef = jax.tree.flatten(params)
    turn = 0
    masks = [[] for _ in range(count)]
    for path, leaf in zip(paths, leaves, strict=True):
        stacked = path.startswith("['blocks']")
        for f in range(count):
            mask = np.zeros(np.shape(leaf))
            if stacked:
                for stage in np.split(mask, stages):  # views
                    stage[f::count] = 1
            elif turn % count == f:
                mask[...] = 1
            masks[f].append(mask)
        turn += not stacked
    return [treedef.unflatten(mask) for mask in masks]


def diloco(
    tx,
    loss,
    params,
    batches,
    replicas,
    *,
    sync_every,
    fragments=1,
    delay=0,
    mix=0.0,
    outer=NESTEROV,
    warmup_steps=0,
    stages=1,
):
    """Return (shared parameters, each replica's parameters) after training on global batches."""
    warmup = warmup_steps
    step, gradient = _compiled(tx, loss)
    shared = jax.tree.map(np.asarray, params)
    replica_params = [params] * replicas
    states = [tx.init(params)] * replicas
    velocity = jax.tree.map(np.zeros_like, shared)
    masks = fragment_masks(params, fragments, stages)
    pending = {}
    mu = outer["momentum"]
    for t, batch in enumerate(batches, start=1):
        rows = own_batches(batch, replicas)
        if t <= warmup:
            grads = [gradient(replica_params[0], entry) for entry in rows]
            mean = jax.tree.map(lambda *g: sum(g) / replicas, *grads)
            updates, state = tx.update(mean, states[0], replica_params[0])
            replica_params = [optax.apply_updates(replica_params[0], updates)] * replicas
            states = [state] * replicas
            shared = jax.tree.map(np.asarray, replica_params[0])
            continue
        results = [step(replica_params[i], states[i], rows[i]) for i in range(replicas)]
        replica_params = [p for p, _ in results]
        states = [s for _, s in results]
        for f, mask in enumerate(masks):
            after = t - warmup
            if after % sync_every == (f + 1) * sync_every // fragments % sync_every:
                mean = jax.tree.map(
                    lambda s, *o: s - sum(np.asarray(x) for x in o) / replicas,
                    shared,
                    *replica_params,
                )
                pending[t + delay] = (mask, mean)
        if t in pending:
            mask, delta = pending.pop(t)
            velocity = jax.tree.map(
                lambda m, v, d: np.where(m > 0, mu * v + d, v), mask, velocity, delta
            )
            ahead = jax.tree.map(
                lambda v, d: d + mu * v if outer["nesterov"] else v, velocity, delta
            )
            shared = jax.tree.map(
                lambda m, s, u: np.where(m > 0, s - outer["rate"] * u, s), mask, shared, ahead
            )
            replica_params = [
                jax.tree.map(
                    lambda m, s, x: jnp.asarray(
                        np.where(m > 0, (1 - mix) * s + mix * np.asarray(x), x)
                    ),
                    mask,
                    shared,
                    entry,
                )
                for entry in replica_params
            ]
    return shared, replica_params


@functools.cache
def _compiled(tx, loss):
    return jax.jit(lambda p, s, b: _inner_step(tx, loss, p, s, b)), jax.jit(jax.grad(loss))


def _inner_step(tx, loss, params, state, batch):
    updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state
