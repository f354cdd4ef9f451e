"""Reading and setting what `optax.inject_hyperparams` keeps in the optimizer state."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, TrainState
from shardopt.local_updates.state import PerReplica

_REMEDY = "wrap the optimizer, as in optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)."


def hyperparams(state: TrainState) -> dict[str, float | np.ndarray]:
    """Return the hyperparameters of `optax.inject_hyperparams` states, wherever they are in the optimizer state.

    Args:
      state: a train state.

    Returns:
      {name: value}, numbers on the host (numpy arrays for those with a shape). A name that several injected states
      share is preceded by their key paths: "0/learning_rate", "1/learning_rate". Of `local_sgd` and `diloco` one value
      where all replicas have the same, else all of them [replicas, ...]; with several processes all must call it.

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
    found = _find("hyperparams", state)
    values = {name: _on_host(one) for name, one in found.items()}
    return {name: value.item() if np.ndim(value) == 0 else value for name, value in values.items()}


def with_hyperparams(state: TrainState, **values: float | np.ndarray | jax.Array) -> TrainState:
    """Return the state with other hyperparameters, to be called between steps.

    Shapes, dtypes and placement stay, so the next step runs the program that is already compiled. Every other leaf is
    shared with the state passed in: use only the returned one from here on. With several processes all must set the
    same values. Of `local_sgd` and `diloco` a value is set on all replicas, or [replicas, ...] one on each.

    Args:
      state: a train state.
      **values: new values by the names that `hyperparams` gives; pass those with a path as `**{"0/learning_rate": 1e-3}`.

    Raises:
      TypeError: if a value is not a number or an array of numbers.
      ValueError: if the state has no injected hyperparameters, a name is unknown or follows a schedule (which would
        overwrite it at the next step), a shape differs, or a value is NaN or does not fit its dtype.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from shardopt import TrainState
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> params = {"w": jnp.zeros(2)}
      >>> state = TrainState(jnp.int32(0), params, tx.init(params), jax.random.key_data(jax.random.key(0)))
      >>> hyperparams(with_hyperparams(state, learning_rate=0.25))
      {'learning_rate': 0.25}
    """
    who = "with_hyperparams"
    found = _find(who, state)
    if unknown := sorted(set(values) - set(found)):
        fix = f"choose from {', '.join(sorted(found))}."
        raise ValueError(format_error(who, f"no hyperparameter is named {', '.join(map(repr, unknown))}.", fix=fix))
    if scheduled := sorted(name for name in values if found[name].scheduled):
        what = f"{', '.join(map(repr, scheduled))} would be overwritten by a schedule at the next step."
        raise ValueError(format_error(who, what, fix="inject a number instead of the schedule, and set it as you go."))
    new = {found[name].path: _like(name, found[name], value) for name, value in values.items()}
    opt_state = jax.tree_util.tree_map_with_path(lambda path, leaf: new.get(path, leaf), state.opt_state)
    return state._replace(opt_state=opt_state)


_KeyPath = tuple[jax.tree_util.GetAttrKey | jax.tree_util.DictKey | jax.tree_util.SequenceKey, ...]


class _Injected(NamedTuple):
    path: _KeyPath
    value: jax.Array | np.ndarray
    scheduled: bool
    per_replica: bool


def _find(who: str, state: TrainState) -> dict[str, _Injected]:
    if not hasattr(state, "opt_state"):
        raise TypeError(f"{who}: state must be a TrainState, got {type(state).__name__}.")
    found = list(_walk((), state.opt_state))
    if not found:
        raise ValueError(format_error(who, "the optimizer state has no injected hyperparameters.", fix=_REMEDY))
    count = Counter(name for _, name, _ in found)
    return {name if count[name] == 1 else f"{prefix}/{name}".lstrip("/"): one for prefix, name, one in found}


def _walk(prefix: _KeyPath, tree: PyTree) -> Iterator[tuple[str, str, _Injected]]:
    """Yield (path of the injected state, name, hyperparameter); an inner state may hold injected ones again."""
    for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: _is_injected(x) or isinstance(x, PerReplica)
    ):
        here = (*prefix, *path)
        if isinstance(node, PerReplica):
            for text, name, one in _walk((*here, jax.tree_util.GetAttrKey("value")), node.value):
                yield text, name, one._replace(per_replica=True)
            continue
        if not _is_injected(node):
            continue
        scheduled = getattr(node, "hyperparams_states", {})
        field = jax.tree_util.GetAttrKey("hyperparams")
        for name, value in node.hyperparams.items():
            full = (*here, field, jax.tree_util.DictKey(name))
            text = jax.tree_util.keystr(here, simple=True, separator="/")
            yield text, name, _Injected(full, value, name in scheduled, per_replica=False)
        yield from _walk((*here, jax.tree_util.GetAttrKey("inner_state")), node.inner_state)


def _is_injected(node: object) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _on_host(one: _Injected) -> np.ndarray:
    """Return a value as numpy; where all replicas have the same, a single one."""
    value, sharding = one.value, getattr(one.value, "sharding", None)
    if isinstance(sharding, NamedSharding) and not (sharding.is_fully_addressable or sharding.is_fully_replicated):
        value = jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(value)
    value = np.asarray(jax.device_get(value))
    return value[0] if one.per_replica and (value == value[:1]).all() else value


def _like(name: str, one: _Injected, value: float | np.ndarray | jax.Array) -> jax.Array | np.ndarray:
    """Return the value as an array with the shape, dtype and placement of the one it replaces."""
    who, old = "with_hyperparams", one.value
    numeric = isinstance(value, int | float | np.generic | np.ndarray | jax.Array) and not isinstance(value, bool)
    given = np.asarray(jax.device_get(value)) if numeric else None
    if given is None or not jnp.issubdtype(given.dtype, jnp.number):
        raise TypeError(f"{who}: {name} must be a number, got {value!r} ({type(value).__name__}).")
    if one.per_replica and given.shape == old.shape[1:]:
        given = np.broadcast_to(given, old.shape)
    if given.shape != old.shape:
        raise ValueError(f"{who}: {name} has shape {old.shape}, got {given.shape}.")
    if np.isnan(given).any():
        raise ValueError(f"{who}: {name} must not be NaN.")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = given.astype(old.dtype)
    exact = jnp.issubdtype(old.dtype, jnp.integer)
    if not np.array_equal(cast, given) if exact else not np.array_equal(np.isinf(cast), np.isinf(given)):
        raise ValueError(f"{who}: {name} has dtype {old.dtype}, which cannot hold {value!r}.")
    if not isinstance(old, jax.Array):
        return cast
    if jax.process_count() > 1:
        return jax.make_array_from_callback(cast.shape, old.sharding, lambda index: cast[index])
    return jax.device_put(cast, old.sharding)
