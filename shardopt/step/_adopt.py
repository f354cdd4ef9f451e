"""Train states from elsewhere: plain trees, or flax's `TrainState`, placed where a strategy keeps
its state.
"""

from typing import Any

import jax
import numpy as np

from shardopt.config._compression import CompressedOptState
from shardopt.config._user_mesh import on_auto_axes
from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, error_text, plural
from shardopt.core._types import PyTree, TrainState, abstract, leaves_with_paths
from shardopt.mesh import on_mesh
from shardopt.step._inputs import copied
from shardopt.step._optimizer import ShardedOptimizer, check_is_strategy


@calling("adopt")
def adopt(
    opt: ShardedOptimizer,
    params: Any,
    opt_state: PyTree = None,
    *,
    step: int = 0,
    rng: jax.Array | None = None,
) -> TrainState:
    """Return a train state that continues from parameters and an optimizer state of another
    program.

    With p the parameters, s the optimizer state and n the step: the next `opt.step` is step n of
    `opt.wrapped` from (p, s).

    Args:
      opt: the strategy to go on with.
      params: a pytree of arrays. Or flax's `TrainState` (anything with `params`, `opt_state` and
        `step`), whose parts are taken.
      opt_state: the state of `opt.wrapped` for the trained parameters, in its own containers or in
        nested dicts and lists with the same key paths, as a checkpoint returns them. By default the
        first state.
      step: steps taken so far.
      rng: the key of the steps, as in `opt.init`.

    Returns:
      A `TrainState`.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`, or `params` as `opt.init` says.
      ValueError: if a leaf of the optimizer state is missing, left over, or of another shape or
        dtype. If an optimizer state is passed, and each replica keeps its own (`local_sgd`,
        `diloco`).

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx, params = optax.adam(0.1), {"w": jnp.ones((64, 32))}
      >>> opt = so.fsdp(tx, so.make_mesh(), lambda params, batch: jnp.mean(batch @ params["w"]))
      >>> state = so.adopt(opt, params, tx.init(params), step=7)
      >>> int(state.step), state.opt_state[0].mu["w"].addressable_shards[0].data.shape
      (7, (8, 32))

    **Equivalence**: exact; values are copied, not changed. Training goes on as it would have in the
    other program, if the optax chain, loss and batches are the same.

    **Placement**: as `opt.init` places them. The arguments are copied and stay valid.
    """
    check_is_strategy(opt)
    if all(hasattr(params, name) for name in ("params", "opt_state", "step")):
        step = int(jax.device_get(params.step))
        params, opt_state = params.params, params.opt_state
    check_count("step", step, minimum=0)
    if opt_state is not None and opt.config.local_updates is not None:
        problem = (
            f"the replicas of {opt.config.strategy} keep an optimizer state each, and one was"
            " passed."
        )
        fix = "leave opt_state out: each replica starts with a new one."
        raise ValueError(error_text(problem, fix=fix))
    state = opt.init(params, rng)
    step_count = np.asarray(step, state.step.dtype)
    state = state._replace(step=jax.device_put(step_count, state.step.sharding))
    if opt_state is None:
        return state
    compressed = isinstance(state.opt_state, CompressedOptState)
    first_opt_state = state.opt_state.optimizer if compressed else state.opt_state
    new_opt_state = _place(opt, _match_structure(opt_state, first_opt_state), first_opt_state)
    return state._replace(
        opt_state=state.opt_state._replace(optimizer=new_opt_state) if compressed else new_opt_state
    )


def _match_structure(tree: PyTree, target: PyTree) -> PyTree:
    """Return the leaves of `tree` in the containers of `target`, matched by key path.

    Raise ValueError if they do not fit.
    """
    leaves, target_paths = (
        dict(leaves_with_paths(tree)),
        [path for path, _ in leaves_with_paths(target)],
    )
    shapes = {path: _format_shape(leaf) for path, leaf in leaves.items()}
    target_shapes = {path: _format_shape(leaf) for path, leaf in leaves_with_paths(target)}
    missing = [
        f"{path}: {target_shapes[path]}, missing" for path in target_paths if path not in shapes
    ]
    left_over = [
        f"{path}: {shapes[path]}, left over" for path in shapes if path not in target_shapes
    ]
    different = [
        f"{path}: {shapes[path]}, {target_shapes[path]} wanted"
        for path in target_paths
        if shapes.get(path, "") not in ("", target_shapes[path])
    ]
    if missing or left_over or different:
        counts = (
            f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)}"
            " different"
        )
        problem = (
            f"the optimizer state is not that of opt.wrapped over the trained parameters: {counts}."
        )
        fix = (
            "build opt with the optax chain that made it, or leave opt_state out to start a new"
            " one."
        )
        raise ValueError(error_text(problem, [*different, *missing, *left_over], fix))
    return jax.tree.unflatten(jax.tree.structure(target), [leaves[path] for path in target_paths])


def _format_shape(leaf: Any) -> str:
    abstract_leaf = abstract(leaf)
    return f"{abstract_leaf.dtype}{list(abstract_leaf.shape)}"


def _place(opt: ShardedOptimizer, opt_state: PyTree, first_opt_state: PyTree) -> PyTree:
    """Return copies of `opt_state` placed as the first state, and free the memory of the first
    state.
    """
    target_shardings = jax.tree.map(lambda leaf: leaf.sharding, first_opt_state)
    for leaf in jax.tree.leaves(first_opt_state):
        leaf.delete()
    with jax.set_mesh(None):
        placed = jax.device_put(opt_state, jax.tree.map(on_auto_axes, target_shardings))
        return jax.jit(on_mesh(opt.config.mesh, copied), out_shardings=target_shardings)(placed)
