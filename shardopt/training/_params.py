"""Set parameters between steps: a coefficient, a reference model, a teacher."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardopt.config._user_mesh import on_auto_axes, on_auto_mesh
from shardopt.core._errors import format_error, plural
from shardopt.core._types import PyTree, TrainState, is_array_like, leaves_with_paths
from shardopt.local_updates._state import PerReplica, Replicas
from shardopt.step._inputs import copied

_CALLER = "with_params"


def with_params(state: TrainState, values: PyTree) -> TrainState:
    """Return the state with new values for some parameters; call it between steps.

    It is meant for the leaves in `frozen`: a coefficient of the loss, a reference model, a teacher.
    Shapes, dtypes and placement do not change, so the next step runs the compiled program. The
    optimizer state does not change either. So a trained leaf keeps its moments, and the copy of it
    that some optimizers hold (schedule-free, lookahead).

    Use only the returned state afterwards: its other leaves are shared with the old state. With
    several processes all must pass the same values.

    Args:
      state: a train state. With `local_sgd` and `diloco`, a value is set in the shared parameters
        and on each replica.
      values: a tree with the new values, as a part of the parameter tree: `{"kl": 0.1, "teacher":
        params}`. Leaves are numpy or jax arrays, or numbers. Key paths match them to parameters, so
        a flat dict works too: `{"teacher/dense/kernel": kernel}`.

    Returns:
      The train state for the next step.

    Raises:
      TypeError: if `state` is no `TrainState`, if a value is not an array or a number, or if its
        kind does not fit (floating values for integers).
      ValueError: if no parameter has the key path of a value, if a shape differs, if integers do
        not fit the dtype, or if the state was already passed to a step.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> def loss_fn(params, batch):
      ...     drift = jnp.mean((params["w"] - params["reference"]) ** 2)
      ...     return jnp.mean((batch @ params["w"]) ** 2) + params["kl"] * drift
      >>> opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), loss_fn, frozen=["reference", "kl"])
      >>> w = jnp.ones((8, 8))
      >>> state = opt.init({"w": w, "reference": w, "kl": 0.5})
      >>> state, _ = opt.step(state, jnp.ones((8, 8)))
      >>> state = so.with_params(state, {"reference": state.params["w"], "kl": 0.25})
      >>> float(state.params["kl"]), bool((state.params["reference"] == state.params["w"]).all())
      (0.25, True)

    **Placement**: each value is copied and gets the sharding of the old value. So an array that you
    pass, even one of the state itself, is still valid after the next step.

    **Communication**: none for arrays on the host. An array on devices is sent to the devices of
    the old value.
    """
    if not isinstance(state, TrainState):
        fix = "pass the state that opt.init or opt.step returned."
        raise TypeError(
            format_error(
                _CALLER, f"state must be a TrainState, got {type(state).__name__}.", fix=fix
            )
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        problem = "this state was given to step already, which takes over its memory."
        raise ValueError(format_error(_CALLER, problem, fix="pass the state that step returned."))
    new_leaves = leaves_with_paths(values)
    param_leaves = leaves_with_paths(state.params)
    _check(param_leaves, new_leaves)
    index_by_path = {path: index for index, (path, _) in enumerate(param_leaves)}
    replicas = state.opt_state if isinstance(state.opt_state, Replicas) else None
    replica_leaves = [] if replicas is None else jax.tree.leaves(replicas.params.value)
    shared_leaves = [leaf for _, leaf in param_leaves]
    with jax.set_mesh(None), jax.transfer_guard("allow"):
        for path, value in new_leaves:
            index = index_by_path[path]
            shared_leaves[index] = _placed_like(shared_leaves[index], value)
            if replicas is not None:
                replica_leaves[index] = _placed_like(replica_leaves[index], value)
    unflatten = jax.tree.structure(state.params).unflatten
    if replicas is None:
        return state._replace(params=unflatten(shared_leaves))
    return state._replace(
        params=unflatten(shared_leaves),
        opt_state=replicas._replace(params=PerReplica(unflatten(replica_leaves))),
    )


def _check(param_leaves: list[tuple[str, Any]], new_leaves: list[tuple[str, Any]]) -> None:
    """Refuse values that do not fit the parameters; the error lists all of them by key path."""
    leaves = dict(param_leaves)
    new_paths = [path for path, _ in new_leaves]
    known_paths = [path for path, _ in param_leaves]
    unknown_paths = [path or "values" for path in new_paths if path not in leaves]
    if unknown_paths:
        fix = f"name parameters by their key paths, such as {', '.join(known_paths[:8])}."
        raise ValueError(
            format_error(
                _CALLER,
                f"{plural(len(unknown_paths), 'value')} named no parameter.",
                unknown_paths,
                fix,
            )
        )
    duplicate_paths = sorted(
        {path for path in new_paths if new_paths.count(path) > 1 or known_paths.count(path) > 1}
    )
    if duplicate_paths:
        problem = f"{plural(len(duplicate_paths), 'key path')} stands for several leaves."
        fix = "give each value one leaf, with a key path of its own."
        raise ValueError(format_error(_CALLER, problem, duplicate_paths, fix))
    wrong_kind = [
        f"{path}: {_kind(leaves[path].dtype)}, got {_value_text(value)}"
        for path, value in new_leaves
        if not _fits(leaves[path], value)
    ]
    if wrong_kind:
        problem = "values must be arrays or numbers of the kind that they replace."
        raise TypeError(
            format_error(_CALLER, problem, wrong_kind, "convert them, as by value.astype(dtype).")
        )
    wrong_shape = [
        f"{path}: shape {leaves[path].shape}, got {np.shape(value)}"
        for path, value in new_leaves
        if leaves[path].shape != np.shape(value)
    ]
    if wrong_shape:
        problem = f"{plural(len(wrong_shape), 'value')} of another shape."
        raise ValueError(
            format_error(
                _CALLER, problem, wrong_shape, "give each value the shape of the parameter."
            )
        )
    out_of_range = [
        f"{path}: {leaves[path].dtype}"
        for path, value in new_leaves
        if not _holds(leaves[path].dtype, value)
    ]
    if out_of_range:
        problem = f"{plural(len(out_of_range), 'parameter')} cannot hold the integers given."
        raise ValueError(
            format_error(
                _CALLER, problem, out_of_range, "give values within the range of the dtype."
            )
        )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(dtype: Any) -> str:
    kinds = {"b": "boolean", "i": "integer", "u": "integer", "c": "complex"}
    return (
        str(dtype)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key)
        else kinds.get(np.dtype(dtype).kind, "floating")
    )


def _value_text(value: Any) -> str:
    return (
        f"{value.dtype}{list(value.shape)}"
        if is_array_like(value)
        else f"{value!r:.40} ({type(value).__name__})"
    )


def _fits(leaf: Any, value: Any) -> bool:
    """Return whether a value has the kind of a leaf, or a narrower kind: a floating leaf can hold
    integers.
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return False
    dtype = (
        jnp.result_type(value) if isinstance(value, bool | int | float | complex) else value.dtype
    )
    if _is_key(leaf) or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype == leaf.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        return False
    widening_order = ["integer", "floating", "complex"]
    leaf_kind, value_kind = _kind(leaf.dtype), _kind(dtype)
    if "boolean" in (leaf_kind, value_kind):
        return leaf_kind == value_kind
    return widening_order.index(value_kind) <= widening_order.index(leaf_kind)


def _holds(dtype: Any, value: Any) -> bool:
    if isinstance(value, jax.Array) or not jnp.issubdtype(dtype, jnp.integer):
        return True
    limits, values = jnp.iinfo(dtype), np.asarray(value)
    return not values.size or (values.min() >= limits.min and values.max() <= limits.max)


def _placed_like(old: jax.Array, value: Any) -> jax.Array:
    """Return a copy of a value with the dtype and sharding of the old array.

    If the old array is stacked over replicas, each replica gets a copy.
    """
    impl, dtype = None, old.dtype
    if _is_key(old):
        impl, value, dtype = (
            str(jax.random.key_impl(old)),
            jax.random.key_data(value),
            np.dtype(np.uint32),
        )
    sharding = _unstacked(
        on_auto_axes(old.sharding), num_stacked_dims=old.ndim - np.ndim(value) + (impl is not None)
    )
    multiple_processes = jax.process_count() > 1
    if isinstance(value, jax.Array) and not (multiple_processes and value.is_fully_addressable):
        placed = value if multiple_processes else jax.device_put(value, sharding)
    else:
        host_values = np.asarray(jax.device_get(value)).astype(dtype)
        placed = jax.make_array_from_callback(
            host_values.shape, sharding, lambda index: host_values[index]
        )
    return _copy_program(old.shape, dtype, impl, old.sharding)(placed)


def _unstacked(sharding: Sharding, *, num_stacked_dims: int) -> Sharding:
    """Return the sharding of one value, without the leading dims over which copies are stacked."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[num_stacked_dims:]))


@functools.lru_cache(maxsize=256)
def _copy_program(
    shape: tuple[int, ...], dtype: Any, impl: str | None, sharding: Sharding
) -> jax.stages.Wrapped:
    def run(value: jax.Array) -> jax.Array:
        leaf = value.astype(dtype) if impl is None else jax.random.wrap_key_data(value, impl=impl)
        return copied(jnp.broadcast_to(leaf, shape))

    return jax.jit(on_auto_mesh(sharding, run), out_shardings=sharding)
