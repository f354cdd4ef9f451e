"""From a recipe to the contract: init, step and the rest, for every ring-1 strategy alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.errors import complaint
from shardopt.core.optimizer import ShardedOptimizer
from shardopt.core.types import PyTree, TrainState, abstract, is_array_like
from shardopt.partition import Report, report
from shardopt.partition.paths import leaves_with_paths
from shardopt.strategies.batch import batch_sharding, check_batch, place_batch
from shardopt.strategies.gradients import make_gradients, make_loss
from shardopt.strategies.layout import Layout, make_layout, shardings
from shardopt.strategies.placement import Placement
from shardopt.strategies.recipe import Recipe, check_recipe
from shardopt.strategies.update import apply_update, global_norm


class Config(NamedTuple):
    """How a strategy was built. `report(abstract_params=None)` gives the placement of every leaf."""

    strategy: str
    mesh_shape: dict[str, int]
    placement: Placement
    micro_batches: int
    rules: Any
    min_shard_elements: int
    gather_dtype: str | None
    frozen: tuple[str, ...]
    report: Callable[..., Report]


class Program(NamedTuple):
    """A recipe compiled for one parameter structure."""

    layout: Layout
    shardings: TrainState
    step: Any
    loss: Any


def build(recipe: Recipe) -> ShardedOptimizer:
    """Check the recipe and return its optimizer; nothing is compiled before parameters are seen."""
    recipe = check_recipe(recipe)
    programs = _Programs(recipe)
    on_batch = batch_sharding(recipe)

    def init(params: Any, rng: jax.Array | None = None) -> TrainState:
        rng = jax.random.key(0) if rng is None else rng
        if _is_function(params):
            return _init_from_function(recipe, programs, params, rng)
        return _init_from_values(recipe, programs, params, rng)

    def on_batches(run: Callable[[Program, TrainState, PyTree], Any]) -> Callable[[TrainState, PyTree], Any]:
        def call(state: TrainState, batch: PyTree) -> Any:
            check_batch(recipe, batch)
            return run(programs.of(state.params), state, place_batch(batch, on_batch))

        return call

    pace = _pace(recipe)
    step = on_batches(lambda program, state, batch: pace(program.step(state, batch)))
    evaluate = on_batches(lambda program, state, batch: pace(program.loss(state, batch)))
    step.lower = on_batches(lambda program, state, batch: program.step.lower(state, batch))  # type: ignore[attr-defined]
    evaluate.lower = on_batches(lambda program, state, batch: program.loss.lower(state, batch))  # type: ignore[attr-defined]

    def make_report(abstract_params: Any = None) -> Report:
        layout = programs.of(abstract_params).layout
        return report(
            layout.plans,
            layout.specs,
            layout.abstract,
            mesh=recipe.mesh,
            params_split=recipe.placement.params,
            state_split=recipe.placement.opt_state,
        )

    def abstract_state(abstract_params: Any = None) -> TrainState:
        program = programs.of(abstract_params)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            program.layout.abstract,
            program.shardings,
        )

    dtype = recipe.gather_dtype
    return ShardedOptimizer(
        init=init,
        step=step,
        evaluate=evaluate,
        synchronize=jax.block_until_ready,
        specs=lambda abstract_params: programs.of(abstract_params).layout.specs,
        abstract_state=abstract_state,
        wrapped=recipe.tx,
        mesh=recipe.mesh,
        config=Config(
            strategy=recipe.who,
            mesh_shape=dict(recipe.mesh.shape),
            placement=recipe.placement,
            micro_batches=recipe.micro_batches,
            rules=recipe.rules,
            min_shard_elements=recipe.min_shard_elements,
            gather_dtype=None if dtype is None else str(jnp.dtype(dtype)),
            frozen=tuple(recipe.frozen),
            report=make_report,
        ),
    )


class _Programs:
    """The programs of a recipe, one a parameter structure, made when first needed."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.made, self.last = recipe, {}, None

    def of(self, params: PyTree | None) -> Program:
        if params is None:
            if self.last is None:
                what = "no parameters have been seen yet, so nothing can be said of their placement."
                fix = "call opt.init or opt.specs first, or pass the abstract parameters (jax.eval_shape gives them)."
                raise ValueError(complaint(self.recipe.who, what, fix=fix))
            return self.made[self.last]
        leaves, treedef = jax.tree.flatten(params)
        try:
            key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        except AttributeError:
            params = _abstract_params(self.recipe, params)
            return self.of(params)
        if key not in self.made:
            self.made[key] = _make_program(self.recipe, make_layout(self.recipe, abstract(params)))
        self.last = key
        return self.made[key]


def _pace(recipe: Recipe) -> Callable[[Any], Any]:
    """Return what lets at most two calls be under way on CPU, and does nothing elsewhere.

    Fake devices share one thread pool: hundreds of queued programs with collectives can leave no thread for the
    device that the others wait for, and XLA ends the process after 40 seconds.
    """
    previous: list[Any] = [None]

    def wait(result: Any) -> Any:
        metrics = result[1] if isinstance(result, tuple) else result
        jax.block_until_ready(previous[0])
        previous[0] = metrics
        return result

    return wait if recipe.mesh.devices.flat[0].platform == "cpu" else lambda result: result


def _make_program(recipe: Recipe, layout: Layout) -> Program:
    gradients, loss = make_gradients(recipe, layout), make_loss(recipe, layout)
    on_state, on_batch = shardings(recipe.mesh, layout.specs), batch_sharding(recipe)
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        found = gradients(state.params, batch, state.step, state.rng)
        value_fn = lambda params: loss(params, batch)[0]  # noqa: E731
        params, opt_state = apply_update(recipe, layout, state.params, state.opt_state, found, value_fn)
        metrics = {"loss": found.loss, "grad_norm": global_norm(found.grads), **found.metrics}
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    def evaluate(state: TrainState, batch: PyTree) -> dict[str, Any]:
        value, metrics = loss(state.params, batch)
        return {"loss": value, **metrics}

    return Program(
        layout,
        on_state,
        step=jax.jit(step, in_shardings=(on_state, on_batch), out_shardings=(on_state, everywhere), donate_argnums=0),
        loss=jax.jit(evaluate, in_shardings=(on_state, on_batch), out_shardings=everywhere),
    )


def _init_from_values(recipe: Recipe, programs: _Programs, params: PyTree, rng: jax.Array) -> TrainState:
    program = programs.of(_abstract_params(recipe, params))
    placed = jax.device_put(params, program.shardings.params)
    # The step donates its state, which must share no buffer with what the user holds; device_put, even with
    # may_alias=False, hands back the same buffer on a device that already has it.
    copied = jax.jit(_copy, out_shardings=program.shardings.params)(placed)
    return _finish_init(recipe, program, copied, rng)


def _init_from_function(recipe: Recipe, programs: _Programs, init_fn: Any, rng: jax.Array) -> TrainState:
    program = programs.of(_abstract_params(recipe, jax.eval_shape(init_fn, rng)))
    return _finish_init(recipe, program, init_program(program, init_fn)(rng), rng)


def init_program(program: Program, init_fn: Callable[[jax.Array], PyTree]) -> Any:
    """Return the jitted `init_fn` whose result is created split: each device makes its own shard."""
    return jax.jit(init_fn, out_shardings=program.shardings.params)


def _finish_init(recipe: Recipe, program: Program, params: PyTree, rng: jax.Array) -> TrainState:
    on, layout = program.shardings, program.layout
    # Copied, because a transformation that keeps the parameters in its state would hand back the same buffers.
    init = jax.jit(lambda params: _copy(recipe.tx.init(layout.trainable(params))), out_shardings=on.opt_state)
    typed = rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    # Folded, so that the steps do not draw what init_fn drew.
    key = jax.random.key_data(jax.random.fold_in(typed, 0))
    step, key = jax.device_put((jnp.zeros((), jnp.int32), key), (on.step, on.rng))
    return TrainState(step, params, init(params), key)


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def _is_function(params: Any) -> bool:
    """A callable pytree such as an equinox module is parameters; a callable leaf makes them."""
    return callable(params) and jax.tree.structure(params) == jax.tree.structure(0)


def _abstract_params(recipe: Recipe, params: PyTree) -> PyTree:
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
