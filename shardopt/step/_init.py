"""The first train state: parameters placed or created sharded, and the optimizer state of these
parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, TrainState, calling, is_key, type_error
from shardopt.step._cache import LayoutCache
from shardopt.step._compile import AotCompiled, make_program
from shardopt.step._global_rows import Rows, RowsOfOne
from shardopt.step._host_values import params_as_arrays
from shardopt.step._inputs import check_not_traced, check_params, copied, is_init_fn, put, typed_key
from shardopt.step._programs import CompiledStep


def first_state(
    config: StrategyConfig,
    cache: LayoutCache[CompiledStep],
    params: PyTree,
    rng: jax.Array | None,
    *,
    rows: Rows,
) -> TrainState:
    """Return the first train state, after the checks of `init`.

    Args:
      config: of the strategy.
      cache: its programs, by parameters.
      params: the parameters, or a function that makes them of a key.
      rng: the key that seeds the steps; None for the default.
      rows: joins the batches of the processes of the job.
    """
    with (
        calling(config.strategy),
        jax.transfer_guard("allow"),
    ):  # init must copy parameters to devices
        # Everything below is checked on shapes, before any parameter is computed or copied.
        key = typed_key(rng)
        check_not_traced(params, key)
        init_key = key if rng is None else rng
        params = params_as_arrays(params)
        shapes = jax.eval_shape(params, init_key) if is_init_fn(params) else params
        if not isinstance(rows, RowsOfOne):
            # only several processes load it
            from shardopt.step._same_start import check_same_start

            check_same_start(config, shapes, key)
        compiled = cache.of(check_params(config, shapes))
        return make_state(config, compiled, params, key, init_key)


def make_state(
    config: StrategyConfig,
    compiled: CompiledStep,
    params: PyTree,
    key: jax.Array,
    init_key: jax.Array,
) -> TrainState:
    """Return the first train state, sharded; it shares no buffer with the user's arrays.

    Args:
      config: of the strategy.
      compiled: its programs for these parameters.
      params: the parameters, or a function that makes them of `init_key`.
      key: the key that seeds the steps.
      init_key: the key of the function.
    """
    if is_init_fn(params):
        placed_params = init_program(config, compiled, params)(_replicate_key(config, init_key))
    else:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            fix = "pass arrays, or a function and a key: init(init_fn, rng)."
            raise type_error("init was given shapes without values.", fix=fix)
        # device_put hands back the same buffer on a device that has it already, even with
        # may_alias=False.
        placed_params = compiled.copy_params(jax.tree.map(_put, params, compiled.shardings.params))
    opt_state = compiled.init_opt_state(placed_params)
    # fold_in, so that the steps do not draw the same numbers as init_fn.
    step_and_key = np.int32(0), np.asarray(jax.random.key_data(jax.random.fold_in(key, 0)))
    step, rng = jax.device_put(step_and_key, (compiled.shardings.step, compiled.shardings.rng))
    return TrainState(step, placed_params, opt_state, rng)


def init_program(
    config: StrategyConfig, compiled: CompiledStep, init_fn: Callable[[jax.Array], PyTree]
) -> AotCompiled:
    """Return the jitted `init_fn` with a sharded result: each device makes only its own shard."""
    replicated = NamedSharding(config.mesh, PartitionSpec())
    return make_program(
        config, lambda rng: copied(init_fn(rng)), replicated, compiled.shardings.params
    )


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return a parameter with this sharding.

    Several processes have compared their values. `jax.device_put` would gather all of them.
    """
    is_on_host = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if jax.process_count() == 1 or is_key(leaf) or not is_on_host:
        return jax.device_put(leaf, sharding)
    values = np.asarray(leaf)
    return put(values.astype(jax.dtypes.canonicalize_dtype(values.dtype)), sharding)


def _replicate_key(config: StrategyConfig, key: jax.Array) -> jax.Array:
    """Put a key on the mesh as numbers, because jax puts no typed key on devices of other
    processes.
    """
    typed = is_key(key)
    numbers = np.asarray(jax.random.key_data(key) if typed else key)
    placed = jax.device_put(numbers, NamedSharding(config.mesh, PartitionSpec()))
    return jax.random.wrap_key_data(placed) if typed else placed
