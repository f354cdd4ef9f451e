"""The first train state: created split, sharing no buffer with what the user holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, TrainState, leaves_with_paths
from shardopt.engine.compression import CompressedOptState, init_compression
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout
from shardopt.engine.step import CompiledStep, StepCache, abstract_params
from shardopt.mesh import on_mesh

# Checking the train state that is handed to a step.


def check_state(recipe: StrategyConfig, state: Any) -> None:
    """Refuse what is not a live train state.

    Raises:
      TypeError: if it is not a `TrainState`.
      ValueError: if it was given to a step before, which took over its memory.
    """
    if not isinstance(state, TrainState):
        what = f"the state must be the TrainState that init or step returned, got {type(state).__name__}."
        raise TypeError(format_error(recipe.who, what, fix="call step(state, batch) with state = opt.init(params)."))
    is_array = isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer)
    if is_array and state.step.is_deleted():
        what = "this state was given to step already, which takes over its memory."
        raise ValueError(format_error(recipe.who, what, fix="go on with the state that step returned."))


def check_placement(recipe: StrategyConfig, layout: Layout, placed: TrainState, state: TrainState) -> None:
    """Refuse a state of another optimizer, strategy or mesh.

    Raises:
      ValueError: if the optimizer state has another structure, or a leaf another shape, dtype or sharding.
    """
    fix = "move a state between strategies and meshes with so.save and so.restore, or so.to_bytes and so.from_bytes."
    if jax.tree.structure(state) != jax.tree.structure(layout.abstract):
        what = "the optimizer state is not that of this optimizer: its structure differs."
        raise ValueError(format_error(recipe.who, what, fix=fix))
    problems = []
    wanted = zip(jax.tree.leaves(layout.abstract), jax.tree.leaves(placed), strict=True)
    for (path, leaf), (promised, sharding) in zip(leaves_with_paths(state), wanted, strict=True):
        if (leaf.shape, leaf.dtype) != (promised.shape, promised.dtype):
            problems.append(f"{path}: {leaf.dtype}{list(leaf.shape)}, not {promised.dtype}{list(promised.shape)}")
        elif isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            continue
        elif not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            problems.append(f"{path}: placed as {leaf.sharding}, not {sharding.spec} on this mesh")
    if problems:
        what = f"the state does not live where this strategy keeps it ({plural(len(problems), 'leaf')})."
        raise ValueError(format_error(recipe.who, what, problems, fix))


def init_state(recipe: StrategyConfig, programs: StepCache, params: Any, rng: Any) -> TrainState:
    """Return the first train state, from parameters or from `init_fn` and a key; see `ShardedOptimizer.init`."""
    typed = _typed_key(recipe, rng)
    if _is_function(params):
        program = programs.of(abstract_params(recipe, jax.eval_shape(params, typed if rng is None else rng)))
        placed = init_program(recipe, program, params)(typed if rng is None else rng)
    else:
        program = programs.of(abstract_params(recipe, params))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            fix = "pass arrays, or a function and a key: init(init_fn, rng)."
            raise TypeError(format_error(recipe.who, "init was given shapes without values.", fix=fix))
        # device_put hands back the same buffer on a device that has it already, even with may_alias=False.
        copy = jax.jit(on_mesh(recipe.mesh, copied), out_shardings=program.shardings.params)
        placed = copy(jax.device_put(params, program.shardings.params))
    on = program.shardings

    def init_opt_state(params):
        # Copied, because a transformation that keeps the parameters in its state would hand back the same buffers.
        state = copied(recipe.tx.init(program.layout.trainable(params)))
        through = program.layout.reducer
        return state if through is None else CompressedOptState(state, init_compression(through))

    opt_state = jax.jit(on_mesh(recipe.mesh, init_opt_state), out_shardings=on.opt_state)(placed)
    # Folded, so that the steps do not draw what init_fn drew.
    key = jax.random.key_data(jax.random.fold_in(typed, 0))
    step, key = jax.device_put((jnp.zeros((), jnp.int32), key), (on.step, on.rng))
    return TrainState(step, placed, opt_state, key)


def init_program(recipe: StrategyConfig, program: CompiledStep, init_fn: Callable[[jax.Array], PyTree]) -> Any:
    """Return the jitted `init_fn` whose result is created split: each device makes its own shard."""
    make = on_mesh(recipe.mesh, lambda rng: copied(init_fn(rng)))
    return jax.jit(make, out_shardings=program.shardings.params)


def copied(tree: PyTree) -> PyTree:
    """Copy every leaf, without the weak type that would make the second step another program than the first."""

    def one(leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jnp.copy(leaf)
        return jnp.copy(jax.lax.convert_element_type(leaf, leaf.dtype))

    return jax.tree.map(one, tree)


def _is_function(params: Any) -> bool:
    """A callable pytree such as an equinox module is parameters; a callable leaf makes them."""
    return callable(params) and jax.tree.structure(params) == jax.tree.structure(0)


def _typed_key(recipe: StrategyConfig, rng: Any) -> jax.Array:
    """Return the key as a typed one of the default implementation, which is what the steps use."""
    default = jax.random.key(0)
    if rng is None:
        return default
    if not isinstance(rng, jax.Array):
        what = f"rng must be a random key, got {type(rng).__name__}."
        raise TypeError(format_error(recipe.who, what, fix="pass jax.random.key(seed)."))
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(rng)
    if rng.dtype != default.dtype:
        what = f"rng is a key of another implementation ({rng.dtype}) than jax's default ({default.dtype})."
        raise ValueError(format_error(recipe.who, what, fix="pass jax.random.key(seed), or set jax_default_prng_impl."))
    return rng
