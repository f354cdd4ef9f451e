"""Checks and placement of the inputs of init and step: parameters, keys, train states, batches."""

import re
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding

from shardopt.config._config import StrategyConfig
from shardopt.config._user_mesh import on_auto_axes
from shardopt.core import (
    PyTree,
    TrainState,
    abstract,
    calling,
    format_error,
    is_array_like,
    is_key,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
)
from shardopt.core._block_model import as_block_model
from shardopt.losses._batch_dims import (
    FIX_ROWS,
    check_positions,
    check_row_dims,
    placed_specs,
    row_counts,
    shown_leaves,
)
from shardopt.mesh import data_axes, size_along


def check_params(config: StrategyConfig, params: PyTree) -> PyTree:
    """Return parameters as shapes and dtypes.

    Raises:
      TypeError: if they are a train state, or a leaf is not an array or a number.
      ValueError: if a leaf is a random key that no rule freezes.
    """
    with calling(config.strategy):
        # flax's has the same name
        if isinstance(params, TrainState) or hasattr(params, "apply_gradients"):
            fix = (
                "pass its .params; so.replace(state, opt_state=..., step=...) sets what else it"
                " has."
            )
            raise type_error("parameters were expected, got a TrainState.", fix=fix)
        wrong_leaves = [
            f"{path}: {type(leaf).__name__}"
            for path, leaf in leaves_with_paths(params)
            if not is_array_like(leaf) and not isinstance(leaf, int | float)
        ]
        if wrong_leaves:
            fix = (
                "split the rest off, for instance with equinox.partition(model, equinox.is_array) or"
                " flax.nnx.split."
            )
            raise type_error("parameters must be a pytree of arrays.", wrong_leaves, fix)
        shapes = abstract(params)
        check_keys(shapes, config.layout.frozen)
        return shapes


def check_keys(params: PyTree, frozen: Sequence[str | re.Pattern[str]] | None = None) -> None:
    """Refuse random keys among the parameters: no optimizer changes them, so a loss would draw the
    same numbers at every step.

    Args:
      params: parameters as shapes and dtypes.
      frozen: the regexes of leaves that are not trained; None if the function has no such argument.

    Raises:
      ValueError: if a leaf is a random key that no rule freezes.
    """
    key_paths = [path for path, leaf in leaves_with_paths(params) if is_key(leaf)]
    trained_keys = [
        path for path in key_paths if not any(re.search(pattern, path) for pattern in frozen or ())
    ]
    if trained_keys:
        problem = (
            f"{plural(len(trained_keys), 'parameter leaf')} would be the same random key at every"
            " step, with the same dropout."
        )
        fix = (
            "let the loss take a keyword rng, a new key each step, and leave keys out of the"
            " parameters (so.interop.nnx does both for an nnx module)"
        )
        fix += (
            "."
            if frozen is None
            else "; or freeze them by rules=[(regex, 'frozen')] if they are to stay as they are."
        )
        raise value_error(problem, trained_keys, fix)


def check_not_traced(params: PyTree, rng: jax.Array | None) -> None:
    """Refuse, by a TypeError, to begin under a trace: `init` compiles programs, and another
    optimizer may not call it.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, rng))):
        fix = (
            "call init outside of jax.jit; inside of another optimizer put the optax optimizer"
            " itself, opt.wrapped."
        )
        raise type_error("init was called under a trace, where arrays have no values.", fix=fix)


def check_state(config: StrategyConfig, state: TrainState) -> None:
    """Refuse a value that is not a live train state.

    Raises:
      TypeError: if it is not a `TrainState`.
      ValueError: if it was passed to a step before, which took over its memory.
    """
    if not isinstance(state, TrainState):
        problem = (
            "the state must be the TrainState that init or step returned, got"
            f" {type(state).__name__}."
        )
        fix = "call step(state, batch) with state = opt.init(params)."
        if hasattr(state, "apply_gradients"):
            fix = (
                "this one is flax's: so.replace(opt.init(state.params), opt_state=state.opt_state,"
                " step=int(state.step)) makes one of it."
            )
        raise TypeError(format_error(config.strategy, problem, fix=fix))
    is_array = isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer)
    if is_array and state.step.is_deleted():
        problem = "this state was given to step already, which takes over its memory."
        raise ValueError(
            format_error(config.strategy, problem, fix="go on with the state that step returned.")
        )


def check_placement(
    config: StrategyConfig, abstract: TrainState, shardings: TrainState, state: TrainState
) -> None:
    """Refuse a state of another optimizer, strategy or mesh.

    Raises:
      ValueError: if the optimizer state has another structure, or a leaf another shape, dtype or
        sharding.
    """
    check_structure(config, abstract, state)
    wrong_leaves = []
    expected_leaves = zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True)
    for (path, leaf), (expected, sharding) in zip(
        leaves_with_paths(state), expected_leaves, strict=True
    ):
        if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
            wrong_leaves.append(
                f"{path}: {leaf.dtype}{list(leaf.shape)}, not"
                f" {expected.dtype}{list(expected.shape)}"
            )
        elif isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            continue
        elif not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            wrong_leaves.append(
                f"{path}: placed as {leaf.sharding}, not {sharding.spec} on this mesh"
            )
    if wrong_leaves:
        problem = (
            "the state does not live where this strategy keeps it"
            f" ({plural(len(wrong_leaves), 'leaf')})."
        )
        raise ValueError(format_error(config.strategy, problem, wrong_leaves, _FIX_STATE))


_FIX_STATE = "move a state between strategies and meshes with so.save and so.restore."


def check_structure(config: StrategyConfig, abstract: TrainState, state: TrainState) -> None:
    """Refuse, by a ValueError, a state of another structure."""
    if jax.tree.structure(state) != jax.tree.structure(abstract):
        problem = "the optimizer state is not that of this optimizer: its structure differs."
        raise ValueError(format_error(config.strategy, problem, fix=_FIX_STATE))


def check_rows(config: StrategyConfig, batch: PyTree) -> int | None:
    """Return the number of rows that all leaves of a batch have.

    None in the global view if they do not agree.

    Raises:
      ValueError: if `batch_dims` name a dim that a leaf does not have, or there is no array. If
        devices or replicas see different rows, and no array has rows or the numbers of rows differ.
    """
    check_row_dims(config, batch)
    counts = row_counts(config, batch)
    has_arrays = any(map(np.ndim, jax.tree.leaves(batch)))
    if len(counts) == 1:
        return next(iter(counts))
    if has_arrays and config.has_global_view and not config.per_replica:
        return None
    problem = (
        "batch leaves must agree on a number of rows, the global batch."
        if counts
        else "no batch leaf has rows."
    )
    fix = "give leaves the shape [global batch, ...]."
    if has_arrays:
        global_view_hint = (
            '; or use view="global", which takes leaves of any shapes'
            if config.loss.view == "per_device"
            else ""
        )
        fix = f"{FIX_ROWS}{global_view_hint}."
    raise ValueError(format_error(config.strategy, problem, shown_leaves(config, batch), fix))


def check_batch(
    config: StrategyConfig, batch: PyTree, mixes_rows: Callable[[int], bool] = lambda rows: False
) -> bool:
    """Return whether all rows run at once, because devices and micro-batches do not divide them.

    Args:
      config: the config of the step.
      batch: the global batch.
      mixes_rows: whether the loss of this many rows runs in the global view in any case. It is
        asked if the rows do not divide.

    Raises:
      ValueError: as `check_rows` and `check_positions`; or if replica * data * micro_batches does
        not divide the size.
    """
    size = check_rows(config, batch)
    if size is None:  # then the view is global, for another reason
        check_positions(config, batch)
        return False
    axes = data_axes(config.mesh)
    micro_batches = config.loss.micro_batches
    devices = size_along(config.mesh.shape, axes)
    pieces = devices * micro_batches
    if size == 0 or size % pieces:
        divisors = f"{plural(devices, 'device')} along {' x '.join(axes)}"
        if micro_batches > 1:
            unit = "micro-batches" if config.loss.tile_rows is None else "rows of a tile"
            divisors += f" x {micro_batches} {unit}"
        nearest_sizes = sorted({max(size // pieces, 1) * pieces, (size // pieces + 1) * pieces})
        problem = f"a global batch of {size} is not divisible by {divisors} = {pieces}."
        sizes = f"use a batch of {' or '.join(map(str, nearest_sizes))}"
        may_run_at_once = size > 0 and config.has_global_view and not config.per_replica
        is_global = may_run_at_once and (
            config.loss.view == "global" or mixes_rows(nearest_sizes[-1])
        )
        if not is_global:
            fix = f"{sizes}, or another mesh or micro_batches."
            if may_run_at_once:
                fix = f'{fix} Or view="global", where devices repeat work on rows.'
            raise ValueError(format_error(config.strategy, problem, fix=fix))
        lines = [
            "The whole batch runs at once, and devices repeat work on rows. The step is exact."
        ]
        text = format_error(config.strategy, problem, lines, f"{sizes}.")
        warnings.warn(text, stacklevel=2)
    check_positions(config, batch)
    return size % pieces != 0


def check_alive(config: StrategyConfig, batch: PyTree) -> None:
    """Refuse, by a ValueError, arrays whose memory another function took: with them XLA would end
    the process (jaxlib 0.10.2).
    """
    deleted = [path or "batch" for path, leaf in leaves_with_paths(batch) if is_deleted(leaf)]
    if deleted:
        problem = "the batch has arrays that were deleted."
        fix = "a function that donates them took their memory: pass it a copy, by jnp.copy."
        raise ValueError(format_error(config.strategy, problem, deleted, fix))


def is_deleted(leaf: PyTree) -> bool:
    """Return whether a leaf of a batch is an array that was deleted."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def check_values(config: StrategyConfig, batch: PyTree) -> None:
    """Refuse numbers in a batch on the host that a device cannot hold, or the model cannot read.

    Raises:
      ValueError: if a numpy array of 64 bits has an integer beyond the 32 bits that jax would store.
        Whatever `BlockModel.check_batch` raises.
    """
    if any(map(_has_64_bits, jax.tree.leaves(batch))):
        _check_64_bits(config, batch)
    check = _check_of_model(config)
    if check is not None:
        check(batch)


def has_checked_values(config: StrategyConfig, batch: PyTree) -> bool:
    """Return whether `check_values` reads values of a batch, or only its dtypes."""
    has_check = _check_of_model(config) is not None
    return has_check or any(map(_has_64_bits, jax.tree.leaves(batch)))


def _check_of_model(config: StrategyConfig) -> Callable[[PyTree], None] | None:
    model = as_block_model(config.loss.loss_fn)
    return None if model is None else model.check_batch


def _has_64_bits(leaf: PyTree) -> bool:
    """Return whether a leaf is a numpy array of integers of 64 bits."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu" and leaf.itemsize == 8


def _check_64_bits(config: StrategyConfig, batch: PyTree) -> None:
    too_large = []
    for path, leaf in leaves_with_paths(batch):
        if not _has_64_bits(leaf) or not leaf.size:
            continue
        stored = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if stored.bits == 64:
            continue
        lowest = leaf.min()
        highest = leaf.max()
        if lowest < stored.min or highest > stored.max:
            too_large.append(f"{path or 'batch'}: {leaf.dtype} from {lowest} to {highest}")
    if too_large:
        problem = "jax stores integers in 32 bits, and the batch has larger ones."
        fix = "count from a smaller number, or set jax_enable_x64."
        raise ValueError(format_error(config.strategy, problem, too_large, fix))


def place_batch(config: StrategyConfig, batch: PyTree, *, everywhere: bool = False) -> PyTree:
    """Put each leaf's rows, and positions, on the devices that need them.

    A leaf with the right placement is not copied.

    A numpy leaf holds the whole global batch on every process; only rows for local devices are
    copied. Leaves that all rows share go to all devices.

    Args:
      config: its axes split the batch.
      batch: a pytree of arrays and numbers.
      everywhere: put all rows on all devices instead.
    """

    def place(
        leaf: jax.Array | np.ndarray | float, spec: PartitionSpec
    ) -> jax.Array | jax.ShapeDtypeStruct | float:
        if isinstance(leaf, bool | int | float | complex):
            # a Python number becomes an argument on all devices, and keeps its weak type
            return leaf
        sharding = config.home.shardings(PartitionSpec() if everywhere else spec)
        if isinstance(leaf, Tracer):
            return jax.lax.with_sharding_constraint(leaf, on_auto_axes(sharding))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if isinstance(leaf, jax.Array) and (
            leaf.sharding == sharding or not leaf.is_fully_addressable
        ):
            return leaf
        return put(leaf, sharding)

    return jax.tree.map(place, batch, placed_specs(config, batch))


def put(values: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Return an array with this sharding; each of several processes passes all values."""
    if jax.process_count() == 1:
        return jax.device_put(values, sharding)
    values = np.asarray(values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def typed_key(rng: jax.Array | None) -> jax.Array:
    """Return the key as a typed key of jax's default implementation, which the steps use."""
    default = jax.random.key(0)
    if rng is None:
        return default
    if not isinstance(rng, jax.Array):
        problem = f"rng must be a random key, got {type(rng).__name__}."
        raise type_error(problem, fix="pass jax.random.key(seed).")
    if not is_key(rng):
        return jax.random.wrap_key_data(rng)
    if rng.dtype != default.dtype:
        problem = (
            f"rng is a key of another implementation ({rng.dtype}) than jax's default"
            f" ({default.dtype})."
        )
        raise value_error(problem, fix="pass jax.random.key(seed), or set jax_default_prng_impl.")
    return rng


def is_init_fn(params: PyTree) -> bool:
    """Return whether a function creates the parameters.

    A callable pytree such as an equinox module is itself parameters.
    """
    return callable(params) and jax.tree.structure(params) == jax.tree.structure(0)


def copied(tree: PyTree) -> PyTree:
    """Copy every leaf and drop its weak type, so that the second step does not compile another
    program.
    """

    def copy_leaf(leaf):
        leaf = jnp.asarray(leaf)
        if is_key(leaf):
            return jnp.copy(leaf)
        return jnp.copy(jax.lax.convert_element_type(leaf, leaf.dtype))

    return jax.tree.map(copy_leaf, tree)
