"""A recipe compiled for a parameter structure: the jitted step and evaluation, made when first needed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, TrainState, abstract, is_array_like
from shardopt.mesh import on_mesh
from shardopt.partition.paths import leaves_with_paths
from shardopt.strategies.batch import batch_sharding
from shardopt.strategies.gradient_norm import gradient_norm
from shardopt.strategies.gradients import make_gradients, make_loss
from shardopt.strategies.guard import guarded
from shardopt.strategies.layout import Layout, make_layout, shardings
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.reducing import Reduced
from shardopt.strategies.update import apply_update, make_whole


class Program(NamedTuple):
    """A recipe compiled for one parameter structure.

    Attributes:
      layout: where every leaf lives.
      shardings: the same as a train state of `NamedSharding`.
      step: jitted `(state, batch) -> (state, metrics)`, donating the state.
      evaluate: jitted `(params, batch) -> metrics`.
    """

    layout: Layout
    shardings: TrainState
    step: Any
    evaluate: Any


class Programs:
    """The programs of a recipe, one a parameter structure; remembers the last one asked for."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self._made: dict[Any, Program] = {}
        self._last: Program | None = None

    def of(self, params: PyTree) -> Program:
        """Return the program for parameters as jax holds them, or as `abstract_params` gives them."""
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._made:
            self._made[key] = _make_program(self.recipe, make_layout(self.recipe, abstract(params)))
        self._last = self._made[key]
        return self._last

    def last(self) -> Program:
        """Return the program last asked for.

        Raises:
          ValueError: if there is none.
        """
        if self._last is None:
            what = "no parameters have been seen yet, so nothing can be said of their placement."
            fix = "call opt.init or opt.specs first, or pass the abstract parameters (jax.eval_shape gives them)."
            raise ValueError(complaint(self.recipe.who, what, fix=fix))
        return self._last


def abstract_params(recipe: Recipe, params: PyTree) -> PyTree:
    """Return parameters as shapes and dtypes.

    Raises:
      TypeError: if they are a train state, or a leaf is not an array or a number.
    """
    if isinstance(params, TrainState):
        fix = "pass its .params."
        raise TypeError(complaint(recipe.who, "parameters were expected, got a TrainState.", fix=fix))
    strange = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves_with_paths(params)
        if not is_array_like(leaf) and not isinstance(leaf, int | float)
    ]
    if strange:
        what = "parameters must be a pytree of arrays."
        fix = "split the rest off, for instance with equinox.partition(model, equinox.is_array) or flax.nnx.split."
        raise TypeError(complaint(recipe.who, what, strange, fix))
    return abstract(params)


def pace(recipe: Recipe) -> Callable[[Any], Any]:
    """Return what lets at most two calls be under way on CPU, and does nothing elsewhere.

    Fake devices share one thread pool: hundreds of queued programs with collectives can leave no thread for the
    device that the others wait for, and XLA ends the process after 40 seconds.
    """
    previous: list[Any] = [None]

    def wait(result: Any) -> Any:
        metrics = result[1] if isinstance(result, tuple) else result
        if not isinstance(metrics["loss"], Tracer):
            jax.block_until_ready(previous[0])
            previous[0] = metrics
        return result

    return wait if recipe.mesh.devices.flat[0].platform == "cpu" else lambda result: result


def _make_program(recipe: Recipe, layout: Layout) -> Program:
    gradients, loss = make_gradients(recipe, layout), make_loss(recipe, layout)
    on_state, on_batch = shardings(recipe.mesh, layout.specs), batch_sharding(recipe)
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        def value_fn(params):
            return loss(params, batch, state.step, state.rng)[0]

        opt_state, reducer_state = state.opt_state, None
        if layout.reducer is not None:
            opt_state, reducer_state = opt_state
        found = gradients(state.params, batch, state.step, state.rng, reducer_state)
        params, opt_state = apply_update(recipe, layout, state.params, opt_state, found, value_fn)
        params = make_whole(recipe, layout, params)
        if layout.reducer is not None:
            opt_state = Reduced(opt_state, found.reducer)
        metrics = {"loss": found.loss, "grad_norm": gradient_norm(recipe, layout, found.grads), **found.metrics}
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    def evaluate(params: PyTree, batch: PyTree) -> dict[str, Any]:
        value, metrics = loss(params, batch)
        return {"loss": value, **metrics}

    jitted_step = jax.jit(
        on_mesh(recipe.mesh, step),
        in_shardings=(on_state, on_batch),
        out_shardings=(on_state, everywhere),
        donate_argnums=0,
    )
    jitted_evaluate = jax.jit(
        on_mesh(recipe.mesh, evaluate), in_shardings=(on_state.params, on_batch), out_shardings=everywhere
    )
    return Program(layout, on_state, guarded(recipe, jitted_step), guarded(recipe, jitted_evaluate))
