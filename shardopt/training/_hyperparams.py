"""Read and set the hyperparameters of `optax.inject_hyperparams` in the optimizer state."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import PyTree, TrainState, calling, path_text, quoted, type_error, value_error
from shardopt.local_updates._state import PerReplica
from shardopt.runtime._processes import gather_to_host
from shardopt.step._inputs import put

Hyperparam = float | np.ndarray | jax.Array

_REMEDY = "wrap the optimizer, as in optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)."


@calling("hyperparams")
def hyperparams(state: TrainState) -> dict[str, float | np.ndarray]:
    """Return the hyperparameters of `optax.inject_hyperparams` states anywhere in the optimizer
    state.

    Args:
      state: a train state.

    Returns:
      {name: value}: numbers on the host, or numpy arrays for values with a shape. If several
      injected states have the same name, the name starts with the key path: "0/learning_rate",
      "1/learning_rate". With `local_sgd` and `diloco`, one value if it is equal on all replicas,
      else [replicas, ...]. With several processes all must call it.

    Raises:
      ValueError: if the state has no injected hyperparameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from shardopt import TrainState
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.25)
      >>> params = {"w": jnp.zeros(2)}
      >>> hyperparams(TrainState(jnp.int32(0), params, tx.init(params), jax.random.key_data(jax.random.key(0))))
      {'learning_rate': 0.5, 'momentum': 0.25}
    """
    injected_by_name = _injected_by_name(state)
    values = {name: _on_host(injected) for name, injected in injected_by_name.items()}
    return {name: value.item() if np.ndim(value) == 0 else value for name, value in values.items()}


def set_hyperparams(state: TrainState, values: Mapping[str, Hyperparam]) -> TrainState:
    """Return the state with new hyperparameters, as `so.replace` does."""
    injected_by_name = _injected_by_name(state)
    unknown = sorted(set(values) - set(injected_by_name))
    if unknown:
        fix = f"choose from {', '.join(sorted(injected_by_name))}."
        raise value_error(f"no hyperparameter is named {quoted(unknown)}.", fix=fix)
    scheduled = sorted(name for name in values if injected_by_name[name].scheduled)
    if scheduled:
        problem = f"{quoted(scheduled)} would be overwritten by a schedule at the next step."
        raise value_error(
            problem, fix="inject a number instead of the schedule, and set it as you go."
        )
    new_values = {
        injected_by_name[name].path: _placed_like(name, injected_by_name[name], value)
        for name, value in values.items()
    }
    opt_state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: new_values.get(path, leaf), state.opt_state
    )
    return state._replace(opt_state=opt_state)


_KeyPath = tuple[jax.tree_util.GetAttrKey | jax.tree_util.DictKey | jax.tree_util.SequenceKey, ...]


class _Injected(NamedTuple):
    path: _KeyPath
    value: jax.Array | np.ndarray
    scheduled: bool
    per_replica: bool


def _injected_by_name(state: TrainState) -> dict[str, _Injected]:
    if not hasattr(state, "opt_state"):
        raise type_error(f"state must be a TrainState, got {type(state).__name__}.")
    entries = list(_injected_entries((), state.opt_state))
    if not entries:
        raise value_error("the optimizer state has no injected hyperparameters.", fix=_REMEDY)
    name_counts = Counter(name for _, name, _ in entries)
    return {
        name if name_counts[name] == 1 else f"{path_of_state}/{name}".lstrip("/"): injected
        for path_of_state, name, injected in entries
    }


def _injected_entries(prefix: _KeyPath, tree: PyTree) -> Iterator[tuple[str, str, _Injected]]:
    """Yield (path of the injected state as text, name, hyperparameter), also from nested injected
    states.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: _is_injected(x) or isinstance(x, PerReplica)
    ):
        node_path = (*prefix, *path)
        if isinstance(node, PerReplica):
            for path_of_state, name, injected in _injected_entries(
                (*node_path, jax.tree_util.GetAttrKey("value")), node.value
            ):
                yield path_of_state, name, injected._replace(per_replica=True)
            continue
        if not _is_injected(node):
            continue
        scheduled = getattr(node, "hyperparams_states", {})
        field = jax.tree_util.GetAttrKey("hyperparams")
        for name, value in node.hyperparams.items():
            value_path = (*node_path, field, jax.tree_util.DictKey(name))
            injected = _Injected(value_path, value, name in scheduled, per_replica=False)
            yield path_text(node_path), name, injected
        yield from _injected_entries(
            (*node_path, jax.tree_util.GetAttrKey("inner_state")), node.inner_state
        )


def _is_injected(node: object) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _on_host(injected: _Injected) -> np.ndarray:
    """Return the value as numpy; return one value if all replicas have the same."""
    value = gather_to_host(injected.value)
    return value[0] if injected.per_replica and (value == value[:1]).all() else value


def _placed_like(name: str, injected: _Injected, value: Hyperparam) -> jax.Array | np.ndarray:
    """Return the value as an array with the shape, dtype and placement of the old value."""
    old = injected.value
    if isinstance(old, int | float):  # the user put it there; a step places it
        old = np.asarray(old, np.float32)
    numeric = isinstance(
        value, int | float | np.generic | np.ndarray | jax.Array
    ) and not isinstance(value, bool)
    new_value = np.asarray(jax.device_get(value)) if numeric else None
    if new_value is None or not jnp.issubdtype(new_value.dtype, jnp.number):
        raise type_error(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    if injected.per_replica and new_value.shape == old.shape[1:]:
        new_value = np.broadcast_to(new_value, old.shape)
    if new_value.shape != old.shape:
        raise value_error(f"{name} has shape {old.shape}, got {new_value.shape}.")
    if np.isnan(new_value).any():
        raise value_error(f"{name} must not be NaN.")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = new_value.astype(old.dtype)
    is_integer = jnp.issubdtype(old.dtype, jnp.integer)
    if (
        not np.array_equal(cast, new_value)
        if is_integer
        else not np.array_equal(np.isinf(cast), np.isinf(new_value))
    ):
        raise value_error(f"{name} has dtype {old.dtype}, which cannot hold {value!r}.")
    return put(cast, old.sharding) if isinstance(old, jax.Array) else cast
