"""`replace`: a train state with other parameters, optimizer state, hyperparameters or step."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardopt.config._user_mesh import on_auto_axes, on_auto_mesh
from shardopt.core import (
    PyTree,
    TrainState,
    abstract,
    calling,
    check_count,
    error_text,
    is_array_like,
    is_key,
    leaves_with_paths,
    plural,
    replaced,
    type_error,
    value_error,
    with_leaves,
)
from shardopt.local_updates._state import PerReplica, ReplicaStates
from shardopt.mesh import without_mesh
from shardopt.step._average import average_of
from shardopt.step._compressed import CompressedOptState
from shardopt.step._host_values import params_as_arrays
from shardopt.step._inputs import copied
from shardopt.step._step_counter import LAST_STEP
from shardopt.training._hyperparams import Hyperparam, set_hyperparams

_AVERAGE = "average"


@calling("replace")
def replace(
    state: TrainState,
    *,
    params: PyTree | Literal["average"] = None,
    opt_state: PyTree = None,
    hyperparams: Mapping[str, Hyperparam] | None = None,
    step: int | None = None,
) -> TrainState:
    """Return the state with new values for some of its parts; call it between steps.

    Shapes, dtypes and placement do not change, so the next step runs the compiled program. The new
    values are copied and stay valid. Parts that are not replaced are shared with the old state: do
    not use it after a step from the new one. With several processes all must pass the same values.

    Args:
      state: a train state, as `opt.init` and `opt.step` return it.
      params: new values, as a part of the parameter tree: `{"kl": 0.1, "teacher": params}`. Leaves
        are numpy or jax arrays, or numbers. Key paths match them to parameters, so a flat dict
        works too: `{"teacher/dense/kernel": kernel}`. With `local_sgd` and `diloco`, a value is set
        in the shared parameters and on each replica. The optimizer state does not change: a trained
        leaf keeps its moments, and the copy of it that some optimizers hold (schedule-free,
        lookahead). Or "average": the average of the parameters, of
        `so.transforms.average_params`, or the parameters x that optax's schedule-free optimizers
        evaluate. It may be anywhere in the optimizer state. Leaves without an average stay: frozen
        leaves, batch statistics, and leaves that `optax.masked` leaves out. With `local_sgd` and
        `diloco` it is the mean of the averages of all replicas. Evaluate or export the result, and
        train on with the old state.
      opt_state: the state of `opt.wrapped` for the trained parameters, in its own containers or in
        nested dicts and lists with the same key paths, as a checkpoint returns them.
      hyperparams: new values by the names that `so.training.hyperparams` returns. With `local_sgd`
        and `diloco`, a value is set on all replicas; a value [replicas, ...] sets one on each.
      step: steps taken so far.

    Returns:
      The train state for the next step.

    Raises:
      TypeError: if `state` is no `TrainState`, if a value is not an array or a number, or if its
        kind does not fit (floating values for integers).
      ValueError: if one of these is true:

        - the state was already passed to a step;
        - no parameter has the key path of a value, a shape differs, or integers do not fit the
          dtype;
        - the optimizer state has no average, several of one leaf, or schedule-free in separate
          replicas;
        - a leaf of `opt_state` is missing, left over, or of another shape or dtype;
        - `opt_state` is passed, and each replica keeps its own (`local_sgd`, `diloco`);
        - there are no injected hyperparameters, or none has the name;
        - a hyperparameter follows a schedule, which would overwrite the value at the next step;
        - a hyperparameter has another shape, is NaN, or does not fit its dtype.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> def loss_fn(params, batch):
      ...     drift = jnp.mean((params["w"] - params["reference"]) ** 2)
      ...     return jnp.mean((batch @ params["w"]) ** 2) + params["kl"] * drift
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
      >>> opt = so.fsdp(tx, so.make_mesh(), loss_fn, rules=[("reference|kl", "frozen")])
      >>> w = jnp.ones((8, 8))
      >>> state = opt.init({"w": w, "reference": w, "kl": 0.5})
      >>> state, _ = opt.step(state, jnp.ones((8, 8)))
      >>> state = so.replace(state, params={"reference": state.params["w"], "kl": 0.25})
      >>> float(state.params["kl"]), bool((state.params["reference"] == state.params["w"]).all())
      (0.25, True)
      >>> state = so.replace(state, hyperparams={"learning_rate": 0.25})
      >>> so.training.hyperparams(state)
      {'learning_rate': 0.25}

      A run of another program goes on: its parameters, its optimizer state and its step.

      >>> tx = optax.adam(0.1)
      >>> opt = so.fsdp(tx, so.make_mesh(), lambda params, batch: jnp.mean(batch @ params["w"]))
      >>> params = {"w": jnp.ones((64, 32))}
      >>> state = so.replace(opt.init(params), opt_state=tx.init(params), step=7)
      >>> int(state.step), state.opt_state[0].mu["w"].addressable_shards[0].data.shape
      (7, (8, 32))

    **Equivalence**: exact; values are copied, not changed. With p the parameters, s the optimizer
    state and n the step that are set: the next `opt.step` is step n of `opt.wrapped` from (p, s).

    **Placement**: each value gets the sharding of the old value.

    **Communication**: none for arrays on the host. An array on devices is sent to the devices of
    the old value. An average takes a mean over replicas that train separately. It also takes an
    all-gather of the leaves whose optimizer state is sharded and that are not (ddp: none, zero 1
    and 2: all).
    """
    _check_state(state)
    if opt_state is not None:
        state = _set_opt_state(state, opt_state)
    if hyperparams is not None:
        state = set_hyperparams(state, hyperparams)
    if isinstance(params, str):
        if params != _AVERAGE:
            raise value_error(f"params must be a tree of values or 'average', got {params!r:.80}.")
        state = average_of(state)
    elif params is not None:
        state = _set_params(state, params)
    if step is not None:
        check_count("step", step, minimum=0)
        if step >= LAST_STEP:
            raise value_error(f"step must be below {LAST_STEP:,}, the last int32, got {step:,}.")
        new_step = np.asarray(step, np.int32)
        if isinstance(state.step, jax.Array):
            new_step = jax.device_put(new_step, state.step.sharding)
        state = state._replace(step=new_step)
    return state


def _check_state(state: TrainState) -> None:
    if not isinstance(state, TrainState):
        fix = "pass the state that opt.init or opt.step returned."
        raise type_error(f"state must be a TrainState, got {type(state).__name__}.", fix=fix)
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        problem = "this state was given to step already, which takes over its memory."
        raise value_error(problem, fix="pass the state that step returned.")


def _set_opt_state(state: TrainState, opt_state: PyTree) -> TrainState:
    if isinstance(state.opt_state, ReplicaStates):
        problem = (
            "the replicas of local_sgd and diloco keep an optimizer state each, and one was passed."
        )
        raise value_error(problem, fix="leave opt_state out: each replica goes on with its own.")
    compressed = isinstance(state.opt_state, CompressedOptState)
    old_opt_state = state.opt_state.optimizer if compressed else state.opt_state
    new_opt_state = _place(_match_structure(opt_state, old_opt_state), old_opt_state)
    if compressed:
        new_opt_state = state.opt_state._replace(optimizer=new_opt_state)
    return state._replace(opt_state=new_opt_state)


def _match_structure(tree: PyTree, target: PyTree) -> PyTree:
    """Return the leaves of `tree` in the containers of `target`, matched by key path.

    Raise ValueError if they do not fit.
    """
    leaves = dict(leaves_with_paths(tree))
    shapes = {path: _format_shape(leaf) for path, leaf in leaves.items()}
    target_shapes = {path: _format_shape(leaf) for path, leaf in leaves_with_paths(target)}
    missing = [
        f"{path}: {shape}, missing" for path, shape in target_shapes.items() if path not in shapes
    ]
    left_over = [
        f"{path}: {shape}, left over" for path, shape in shapes.items() if path not in target_shapes
    ]
    different = [
        f"{path}: {shapes[path]}, {shape} wanted"
        for path, shape in target_shapes.items()
        if path in shapes and shapes[path] != shape
    ]
    counts = (
        f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)}"
        " different"
    )
    _refuse(
        [*different, *missing, *left_over],
        f"the optimizer state is not that of opt.wrapped over the trained parameters: {counts}.",
        "build opt with the optax chain that made it, or leave opt_state out to start a new one.",
    )
    return with_leaves(target, [leaves[path] for path in target_shapes])


def _format_shape(leaf: Any) -> str:
    abstract_leaf = abstract(leaf)
    return f"{abstract_leaf.dtype}{list(abstract_leaf.shape)}"


def _set_params(state: TrainState, values: PyTree) -> TrainState:
    new_leaves = leaves_with_paths(params_as_arrays(values))
    param_leaves = leaves_with_paths(state.params)
    _check_values(param_leaves, new_leaves)
    value_by_path = dict(new_leaves)

    def with_values(params):
        paths = [path for path, _ in param_leaves]
        old_leaves = jax.tree.leaves(params)
        indices = [index for index, path in enumerate(paths) if path in value_by_path]
        placed = _place(
            [value_by_path[paths[index]] for index in indices],
            [old_leaves[index] for index in indices],
        )
        return with_leaves(params, replaced(old_leaves, indices, placed))

    if isinstance(state.opt_state, ReplicaStates):
        replica_params = PerReplica(with_values(state.opt_state.params.value))
        state = state._replace(opt_state=state.opt_state._replace(params=replica_params))
    return state._replace(params=with_values(state.params))


def _check_values(param_leaves: list[tuple[str, Any]], new_leaves: list[tuple[str, Any]]) -> None:
    """Refuse values that do not fit the parameters; the error lists all of them by key path."""
    leaves = dict(param_leaves)
    new_paths = [path for path, _ in new_leaves]
    known_paths = [path for path, _ in param_leaves]
    unknown_paths = [path or "params" for path in new_paths if path not in leaves]
    _refuse(
        unknown_paths,
        f"{plural(len(unknown_paths), 'value')} named no parameter.",
        f"name parameters by their key paths, such as {', '.join(known_paths[:8])}.",
    )
    duplicate_paths = sorted(
        {path for path in new_paths if new_paths.count(path) > 1 or known_paths.count(path) > 1}
    )
    _refuse(
        duplicate_paths,
        f"{plural(len(duplicate_paths), 'key path')} stands for several leaves.",
        "give each value one leaf, with a key path of its own.",
    )
    _refuse(
        [
            f"{path}: {_kind(leaves[path].dtype)}, got {_value_text(value)}"
            for path, value in new_leaves
            if not _fits(leaves[path], value)
        ],
        "values must be arrays or numbers of the kind that they replace.",
        "convert them, as by value.astype(dtype).",
        TypeError,
    )
    wrong_shape = [
        f"{path}: shape {leaves[path].shape}, got {np.shape(value)}"
        for path, value in new_leaves
        if leaves[path].shape != np.shape(value)
    ]
    _refuse(
        wrong_shape,
        f"{plural(len(wrong_shape), 'value')} of another shape.",
        "give each value the shape of the parameter.",
    )
    out_of_range = [
        f"{path}: {leaves[path].dtype}"
        for path, value in new_leaves
        if not _holds(leaves[path].dtype, value)
    ]
    _refuse(
        out_of_range,
        f"{plural(len(out_of_range), 'parameter')} cannot hold the integers given.",
        "give values within the range of the dtype.",
    )


def _refuse(
    offenders: Sequence[str], problem: str, fix: str, kind: Callable[[str], Exception] = ValueError
) -> None:
    """Raise an error that lists the offenders, if there are any."""
    if offenders:
        raise kind(error_text(problem, offenders, fix))


def _kind(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    kinds = {"b": "boolean", "i": "integer", "u": "integer", "c": "complex"}
    return kinds.get(np.dtype(dtype).kind, "floating")


def _value_text(value: Any) -> str:
    if is_array_like(value):
        return f"{value.dtype}{list(value.shape)}"
    return f"{value!r:.40} ({type(value).__name__})"


def _fits(leaf: Any, value: Any) -> bool:
    """Return whether a value has the kind of a leaf, or a narrower kind: a floating leaf can hold
    integers.
    """
    if isinstance(value, bool | int | float | complex):
        dtype = jnp.result_type(value)
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        dtype = value.dtype
    else:
        return False
    if is_key(leaf) or is_key(value):
        return dtype == leaf.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        return False
    widening_order = ["integer", "floating", "complex"]
    leaf_kind = _kind(leaf.dtype)
    value_kind = _kind(dtype)
    if "boolean" in (leaf_kind, value_kind):
        return leaf_kind == value_kind
    return widening_order.index(value_kind) <= widening_order.index(leaf_kind)


def _holds(dtype: Any, value: Any) -> bool:
    if isinstance(value, jax.Array) or not jnp.issubdtype(dtype, jnp.integer):
        return True
    limits = jnp.iinfo(dtype)
    values = np.asarray(value)
    return not values.size or (values.min() >= limits.min and values.max() <= limits.max)


def _place(values: PyTree, old: PyTree) -> PyTree:
    """Return copies of values with the dtypes and shardings of old arrays."""
    with without_mesh(), jax.transfer_guard("allow"):
        return jax.tree.map(_placed_like, old, values)


def _placed_like(old: jax.Array, value: Any) -> jax.Array:
    """Return a copy of a value with the dtype and sharding of the old array.

    If the old array is stacked over replicas, each replica gets a copy.
    """
    impl = None
    dtype = old.dtype
    num_stacked_dims = old.ndim - np.ndim(value)
    if is_key(old):
        # jax puts no typed key on devices of other processes
        impl = str(jax.random.key_impl(old))
        value = jax.random.key_data(value)
        dtype = np.dtype(np.uint32)
    sharding = _unstacked(on_auto_axes(old.sharding), num_stacked_dims)
    multiple_processes = jax.process_count() > 1
    if isinstance(value, jax.Array) and not (multiple_processes and value.is_fully_addressable):
        placed = value if multiple_processes else jax.device_put(value, sharding)
    else:
        host_values = np.asarray(jax.device_get(value)).astype(dtype)
        placed = jax.make_array_from_callback(
            host_values.shape, sharding, lambda index: host_values[index]
        )
    # A copy, because the next step takes over the memory of the state.
    return _copy_program(old.shape, dtype, impl, old.sharding)(placed)


def _unstacked(sharding: Sharding, num_stacked_dims: int) -> Sharding:
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
