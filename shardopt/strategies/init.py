"""The first train state: created split, sharing no buffer with what the user holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, TrainState
from shardopt.mesh import on_mesh
from shardopt.strategies.programs import Program, Programs, abstract_params
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.reducing import Reduced, init_reducer


def init_state(recipe: Recipe, programs: Programs, params: Any, rng: Any) -> TrainState:
    """Return the first train state, from parameters or from `init_fn` and a key; see `ShardedOptimizer.init`."""
    typed = _typed_key(recipe, rng)
    if _is_function(params):
        program = programs.of(abstract_params(recipe, jax.eval_shape(params, typed if rng is None else rng)))
        placed = init_program(recipe, program, params)(typed if rng is None else rng)
    else:
        program = programs.of(abstract_params(recipe, params))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            fix = "pass arrays, or a function and a key: init(init_fn, rng)."
            raise TypeError(complaint(recipe.who, "init was given shapes without values.", fix=fix))
        # device_put hands back the same buffer on a device that has it already, even with may_alias=False.
        copy = jax.jit(on_mesh(recipe.mesh, copied), out_shardings=program.shardings.params)
        placed = copy(jax.device_put(params, program.shardings.params))
    on = program.shardings

    def init_opt_state(params):
        # Copied, because a transformation that keeps the parameters in its state would hand back the same buffers.
        state = copied(recipe.tx.init(program.layout.trainable(params)))
        through = program.layout.reducer
        return state if through is None else Reduced(state, init_reducer(through))

    opt_state = jax.jit(on_mesh(recipe.mesh, init_opt_state), out_shardings=on.opt_state)(placed)
    # Folded, so that the steps do not draw what init_fn drew.
    key = jax.random.key_data(jax.random.fold_in(typed, 0))
    step, key = jax.device_put((jnp.zeros((), jnp.int32), key), (on.step, on.rng))
    return TrainState(step, placed, opt_state, key)


def init_program(recipe: Recipe, program: Program, init_fn: Callable[[jax.Array], PyTree]) -> Any:
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


def _typed_key(recipe: Recipe, rng: Any) -> jax.Array:
    """Return the key as a typed one of the default implementation, which is what the steps use."""
    default = jax.random.key(0)
    if rng is None:
        return default
    if not isinstance(rng, jax.Array):
        what = f"rng must be a random key, got {type(rng).__name__}."
        raise TypeError(complaint(recipe.who, what, fix="pass jax.random.key(seed)."))
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(rng)
    if rng.dtype != default.dtype:
        what = f"rng is a key of another implementation ({rng.dtype}) than jax's default ({default.dtype})."
        raise ValueError(complaint(recipe.who, what, fix="pass jax.random.key(seed), or set jax_default_prng_impl."))
    return rng
