"""Train states that were made elsewhere: plain trees, or flax's `TrainState`, placed as a strategy keeps them."""

from typing import Any

import jax
import numpy as np

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, TrainState, abstract, leaves_with_paths
from shardopt.engine.compression import CompressedOptState
from shardopt.engine.inputs import copied
from shardopt.engine.optimizer import ShardedOptimizer, check_is_strategy
from shardopt.engine.user_mesh import on_auto_axes
from shardopt.mesh import on_mesh


def adopt(
    opt: ShardedOptimizer, params: Any, opt_state: PyTree = None, *, step: int = 0, rng: jax.Array | None = None
) -> TrainState:
    """Return a train state of parameters and optimizer state that were made elsewhere, to go on from there.

    With p the parameters, s the optimizer state and n the step: the next `opt.step` is step n of `opt.wrapped` from (p, s).

    **Equivalence**: exact; values are copied, not changed. So training goes on as it would have where they come from, if
    the optax chain, loss and batches are the same.

    **Placement**: as `opt.init` places them. What was passed is copied, and stays as it is.

    Args:
      opt: the strategy to go on with.
      params: a pytree of arrays. Or flax's `TrainState` (anything with `params`, `opt_state` and `step`), whose parts
        are taken.
      opt_state: what `opt.wrapped` keeps for the trained parameters, in its own containers or in nested dicts and lists
        of the same key paths, as they come out of a checkpoint; by default the first state.
      step: steps taken so far.
      rng: the key of the steps, as in `opt.init`.

    Returns:
      A `TrainState`.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`, or `params` as `opt.init` says.
      ValueError: if a leaf of the optimizer state is missing, left over, or of another shape or dtype; if there is one, and
        replicas keep their own (`local_sgd`, `diloco`).

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx, params = optax.adam(0.1), {"w": jnp.ones((64, 32))}
      >>> opt = so.fsdp(tx, so.make_mesh(), lambda params, batch: jnp.mean(batch @ params["w"]))
      >>> state = so.adopt(opt, params, tx.init(params), step=7)
      >>> int(state.step), state.opt_state[0].mu["w"].addressable_shards[0].data.shape
      (7, (8, 32))
    """
    who = "adopt"
    check_is_strategy(who, opt)
    if all(hasattr(params, name) for name in ("params", "opt_state", "step")):
        step = int(jax.device_get(params.step))
        params, opt_state = params.params, params.opt_state
    check_count(who, "step", step, least=0)
    if opt_state is not None and opt.config.local_updates is not None:
        what = f"the replicas of {opt.config.strategy} keep an optimizer state each, and one was passed."
        fix = "leave opt_state out: each replica starts with a new one."
        raise ValueError(format_error(who, what, fix=fix))
    state = opt.init(params, rng)
    first = np.asarray(step, state.step.dtype)
    state = state._replace(step=jax.device_put(first, state.step.sharding))
    if opt_state is None:
        return state
    compressed = isinstance(state.opt_state, CompressedOptState)
    fresh = state.opt_state.optimizer if compressed else state.opt_state
    placed = _place(opt, _as_wanted(who, opt_state, fresh), fresh)
    return state._replace(opt_state=state.opt_state._replace(optimizer=placed) if compressed else placed)


def _as_wanted(who: str, given: PyTree, wanted: PyTree) -> PyTree:
    """Return the leaves given in the containers wanted, each by its key path; raise ValueError if they do not fit."""
    leaves, names = dict(leaves_with_paths(given)), [path for path, _ in leaves_with_paths(wanted)]
    found = {path: _text(leaf) for path, leaf in leaves.items()}
    needed = {path: _text(leaf) for path, leaf in leaves_with_paths(wanted)}
    missing = [f"{path}: {needed[path]}, missing" for path in names if path not in found]
    left_over = [f"{path}: {found[path]}, left over" for path in found if path not in needed]
    other = [
        f"{path}: {found[path]}, {needed[path]} wanted"
        for path in names
        if found.get(path, "") not in ("", needed[path])
    ]
    if missing or left_over or other:
        counts = f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(other)} different"
        what = f"the optimizer state is not that of opt.wrapped over the trained parameters: {counts}."
        fix = "build opt with the optax chain that made it, or leave opt_state out to start a new one."
        raise ValueError(format_error(who, what, [*other, *missing, *left_over], fix))
    return jax.tree.unflatten(jax.tree.structure(wanted), [leaves[path] for path in names])


def _text(leaf: Any) -> str:
    shape = abstract(leaf)
    return f"{shape.dtype}{list(shape.shape)}"


def _place(opt: ShardedOptimizer, given: PyTree, fresh: PyTree) -> PyTree:
    """Return copies of the leaves given, placed as the fresh ones, whose memory is freed."""
    where = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    for leaf in jax.tree.leaves(fresh):
        leaf.delete()
    with jax.set_mesh(None):
        placed = jax.device_put(given, jax.tree.map(on_auto_axes, where))
        return jax.jit(on_mesh(opt.config.mesh, copied), out_shardings=where)(placed)
