"""Setting parameters between steps: a coefficient, a reference model, a teacher."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, TrainState, is_array_like, leaves_with_paths
from shardopt.engine.inputs import copied
from shardopt.engine.user_mesh import on_auto_axes
from shardopt.local_updates.state import PerReplica, Replicas
from shardopt.mesh import on_mesh

_WHO = "with_params"


def with_params(state: TrainState, values: PyTree) -> TrainState:
    """Return the state with other values of some parameters, to be called between steps.

    It is meant for leaves that `frozen` names: a coefficient of the loss, a reference model, a teacher. Shapes, dtypes and
    placement stay, so the next step runs the program that is already compiled. The optimizer state stays as well, so of
    a trained leaf the moments do, and the copy that some optimizers keep (schedule-free, lookahead).

    **Placement**: each value is copied to where the old one lives. So an array that is passed, also one of the state itself,
    is still there after the next step. Every other leaf is shared with the state passed in: use only the returned one from
    here on. With several processes all must pass the same values.

    **Communication**: none for arrays of the host. An array on devices is sent to where the old one lives.

    Args:
      state: a train state. Of `local_sgd` and `diloco` a value is set in what the replicas share, and on each of them.
      values: a tree with the parameters that change, as a part of the parameter tree: `{"kl": 0.1, "teacher": params}`.
        Leaves are numpy or jax arrays, or numbers. They are found by their key paths, so a flat dict does as well:
        `{"teacher/dense/kernel": kernel}`.

    Returns:
      The train state for the next step.

    Raises:
      TypeError: if `state` is no `TrainState`, a value is not an array or a number, or of another kind (floating values for
        integers).
      ValueError: if no parameter has the key path of a value, a shape differs, integers do not fit the dtype, or the state
        was given to a step already.

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
    """
    if not isinstance(state, TrainState):
        fix = "pass the state that opt.init or opt.step returned."
        raise TypeError(format_error(_WHO, f"state must be a TrainState, got {type(state).__name__}.", fix=fix))
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        what = "this state was given to step already, which takes over its memory."
        raise ValueError(format_error(_WHO, what, fix="pass the state that step returned."))
    given = leaves_with_paths(values)
    old = leaves_with_paths(state.params)
    _check(old, given)
    at = {path: i for i, (path, _) in enumerate(old)}
    replicas = state.opt_state if isinstance(state.opt_state, Replicas) else None
    own = [] if replicas is None else jax.tree.leaves(replicas.params.value)
    shared = [leaf for _, leaf in old]
    with jax.set_mesh(None), jax.transfer_guard("allow"):
        for path, value in given:
            i = at[path]
            shared[i] = _like(shared[i], value)
            if replicas is not None:
                own[i] = _like(own[i], value)
    unflatten = jax.tree.structure(state.params).unflatten
    if replicas is None:
        return state._replace(params=unflatten(shared))
    return state._replace(params=unflatten(shared), opt_state=replicas._replace(params=PerReplica(unflatten(own))))


def _check(old: list[tuple[str, Any]], given: list[tuple[str, Any]]) -> None:
    """Refuse values that do not fit the parameters: all of them, by key path."""
    leaves = dict(old)
    paths = [path for path, _ in given]
    known = [path for path, _ in old]
    unknown = [path or "values" for path in paths if path not in leaves]
    if unknown:
        fix = f"name parameters by their key paths, such as {', '.join(known[:8])}."
        raise ValueError(format_error(_WHO, f"{plural(len(unknown), 'value')} named no parameter.", unknown, fix))
    twice = sorted({path for path in paths if paths.count(path) > 1 or known.count(path) > 1})
    if twice:
        what = f"{plural(len(twice), 'key path')} stands for several leaves."
        raise ValueError(format_error(_WHO, what, twice, "give each value one leaf, with a key path of its own."))
    strange = [
        f"{path}: {_kind(leaves[path].dtype)}, got {_text(value)}"
        for path, value in given
        if not _fits(leaves[path], value)
    ]
    if strange:
        what = "values must be arrays or numbers of the kind that they replace."
        raise TypeError(format_error(_WHO, what, strange, "convert them, as by value.astype(dtype)."))
    shapes = [
        f"{path}: shape {leaves[path].shape}, got {np.shape(value)}"
        for path, value in given
        if leaves[path].shape != np.shape(value)
    ]
    if shapes:
        what = f"{plural(len(shapes), 'value')} of another shape."
        raise ValueError(format_error(_WHO, what, shapes, "give each value the shape of the parameter."))
    wide = [f"{path}: {leaves[path].dtype}" for path, value in given if not _holds(leaves[path].dtype, value)]
    if wide:
        what = f"{plural(len(wide), 'parameter')} cannot hold the integers given."
        raise ValueError(format_error(_WHO, what, wide, "give values within the range of the dtype."))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(dtype: Any) -> str:
    kinds = {"b": "boolean", "i": "integer", "u": "integer", "c": "complex"}
    return str(dtype) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else kinds.get(np.dtype(dtype).kind, "floating")


def _text(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if is_array_like(value) else f"{value!r:.40} ({type(value).__name__})"


def _fits(leaf: Any, value: Any) -> bool:
    """Return whether a value is of the kind of a leaf, or of one that it contains, as floating numbers do integers."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return False
    dtype = jnp.result_type(value) if isinstance(value, bool | int | float | complex) else value.dtype
    if _is_key(leaf) or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype == leaf.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        return False
    order = ["integer", "floating", "complex"]
    mine, theirs = _kind(leaf.dtype), _kind(dtype)
    if "boolean" in (mine, theirs):
        return mine == theirs
    return order.index(theirs) <= order.index(mine)


def _holds(dtype: Any, value: Any) -> bool:
    if isinstance(value, jax.Array) or not jnp.issubdtype(dtype, jnp.integer):
        return True
    limits, given = jnp.iinfo(dtype), np.asarray(value)
    return not given.size or (given.min() >= limits.min and given.max() <= limits.max)


def _like(old: jax.Array, value: Any) -> jax.Array:
    """Return a copy of a value with the dtype and sharding of an array; of a stacked one, a copy for each replica."""
    impl, dtype = None, old.dtype
    if _is_key(old):
        impl, value, dtype = str(jax.random.key_impl(old)), jax.random.key_data(value), np.dtype(np.uint32)
    where = _of_value(on_auto_axes(old.sharding), stacked=old.ndim - np.ndim(value) + (impl is not None))
    several = jax.process_count() > 1
    if isinstance(value, jax.Array) and not (several and value.is_fully_addressable):
        placed = value if several else jax.device_put(value, where)
    else:
        numbers = np.asarray(jax.device_get(value)).astype(dtype)
        placed = jax.make_array_from_callback(numbers.shape, where, lambda index: numbers[index])
    return _copy_program(old.shape, dtype, impl, old.sharding)(placed)


def _of_value(where: Sharding, *, stacked: int) -> Sharding:
    """Return the sharding of a value whose copies are stacked: without the dim of the replicas."""
    return (
        NamedSharding(where.mesh, PartitionSpec(*where.spec[stacked:])) if isinstance(where, NamedSharding) else where
    )


@functools.lru_cache(maxsize=256)
def _copy_program(shape: tuple[int, ...], dtype: Any, impl: str | None, where: Sharding) -> jax.stages.Wrapped:
    def run(value: jax.Array) -> jax.Array:
        leaf = value.astype(dtype) if impl is None else jax.random.wrap_key_data(value, impl=impl)
        return copied(jnp.broadcast_to(leaf, shape))

    auto = on_auto_axes(where)
    mesh = auto.mesh if isinstance(auto, NamedSharding) else None
    return jax.jit(on_mesh(mesh, run) if isinstance(mesh, Mesh) else run, out_shardings=where)
