"""A recipe compiled for a parameter structure: the jitted step and evaluation, made when first needed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.audit.collective import read_collective
from shardopt.audit.hlo_text import parse
from shardopt.audit.walk import collectives_of
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, TrainState, abstract, is_array_like, leaves_with_paths
from shardopt.engine.batch import batch_sharding
from shardopt.engine.compression import CompressedOptState
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import make_gradients, make_loss
from shardopt.engine.layout import Layout, make_layout, shardings
from shardopt.engine.update import all_gather_params, apply_update, gradient_norm
from shardopt.mesh import on_mesh
from shardopt.runtime.host_memory import trim_malloc

# Compiling before the first call, so that what the compiler took is given back before the program needs its own.


class AotCompiled:
    """A jitted function, the same in all but one thing: its first call compiles, gives host memory back, then runs.

    Called as it is, jax would compile and run in one go: what compiling took and what the step takes, one on top of
    the other, would be the most that the process ever holds. jax keeps what was compiled ahead, and runs just that.
    """

    def __init__(self, jitted: Any):
        self.jitted, self.lower = jitted, jitted.lower
        self._compiled = False

    def __call__(self, *args: Any) -> Any:
        """Return what the jitted function returns."""
        if not self._compiled and not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            compile_ahead(self.jitted, *args)
            self._compiled = True
        return self.jitted(*args)


def compile_ahead(jitted: Any, *args: Any) -> Any:
    """Return a jitted function compiled for arguments, host memory given back."""
    lowered = jitted.lower(*args)
    trim_malloc()  # what initialisation took, and smaller programs
    compiled = lowered.compile()
    trim_malloc()
    return compiled


# A compiled step that is looked through before it runs, where running it could never end.


def check_no_deadlock(recipe: StrategyConfig, jitted: Any) -> Any:
    """Return a jitted function that compiles ahead of its first call, and refuses to run what would wait for ever.

    Inside a stage's branch, collectives over tensor have groups, so that no other stage is waited for. A permute has
    none: on CPU every device must come to it, and a stage that is idle, or at another kind of work, does not. The
    partitioner puts one into a block that shifts or cuts a dim split over tensor; nothing but the compiled program
    tells. Elsewhere a permute is between its pairs alone.
    """
    on_cpu = recipe.mesh.devices.flat[0].platform == "cpu"
    if recipe.schedule is None or recipe.mesh.shape["tensor"] == 1 or not on_cpu:
        return AotCompiled(jitted)
    return _Guarded(recipe.who, recipe.mesh, jitted)


class _Guarded:
    """Compiles once for each kind of arguments, and keeps what passed."""

    def __init__(self, who: str, mesh: Mesh, jitted: Any):
        self.who, self.mesh, self.jitted, self.lower = who, mesh, jitted, jitted.lower
        self._passed: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self.jitted(*args)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._passed:
            compiled = compile_ahead(self.jitted, *args)
            _check(self.who, self.mesh, compiled.as_text())
            self._passed[key] = compiled
        return self._passed[key](*args)


def _check(who: str, mesh: Mesh, text: str) -> None:
    permutes = [one for one in collectives_of(parse(text)) if one.conditional and one.kind == "collective-permute"]
    read = [read_collective(one, mesh.shape, replicas=1, partitions=mesh.size) for one in permutes]
    # Those over pipeline are our own, in branches that all stages take together (a line search has such).
    places = {_place(one.op_name) for one in read if one is not None and (one.axes is None or "tensor" in one.axes)}
    if not places:
        return
    what = "the partitioner moves data over tensor by permutes inside of stages, which other stages never come to."
    fix = (
        "do not shift, cut or join a dim that a rule splits over tensor: give gate and value, or halves, a dim or a "
        "weight of their own (as shardopt/models/layers.py does), or change the rule."
    )
    raise ValueError(format_error(who, what, sorted(places), fix))


def _place(op_name: str) -> str:
    return op_name.rpartition("closed_call/")[2] or "a collective-permute without a name"


class CompiledStep(NamedTuple):
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


class StepCache:
    """The programs of a recipe, one a parameter structure; remembers the last one asked for."""

    def __init__(self, recipe: StrategyConfig):
        self.recipe = recipe
        self._made: dict[Any, CompiledStep] = {}
        self._last: CompiledStep | None = None

    def of(self, params: PyTree) -> CompiledStep:
        """Return the program for parameters as jax holds them, or as `abstract_params` gives them."""
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._made:
            self._made[key] = _make_program(self.recipe, make_layout(self.recipe, abstract(params)))
        self._last = self._made[key]
        return self._last

    def last(self) -> CompiledStep:
        """Return the program last asked for.

        Raises:
          ValueError: if there is none.
        """
        if self._last is None:
            what = "no parameters have been seen yet, so nothing can be said of their placement."
            fix = "call opt.init or opt.specs first, or pass the abstract parameters (jax.eval_shape gives them)."
            raise ValueError(format_error(self.recipe.who, what, fix=fix))
        return self._last


def abstract_params(recipe: StrategyConfig, params: PyTree) -> PyTree:
    """Return parameters as shapes and dtypes.

    Raises:
      TypeError: if they are a train state, or a leaf is not an array or a number.
    """
    if isinstance(params, TrainState):
        fix = "pass its .params."
        raise TypeError(format_error(recipe.who, "parameters were expected, got a TrainState.", fix=fix))
    strange = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves_with_paths(params)
        if not is_array_like(leaf) and not isinstance(leaf, int | float)
    ]
    if strange:
        what = "parameters must be a pytree of arrays."
        fix = "split the rest off, for instance with equinox.partition(model, equinox.is_array) or flax.nnx.split."
        raise TypeError(format_error(recipe.who, what, strange, fix))
    return abstract(params)


def limit_in_flight(recipe: StrategyConfig) -> Callable[[Any], Any]:
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


def _make_program(recipe: StrategyConfig, layout: Layout) -> CompiledStep:
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
        params = all_gather_params(recipe, layout, params)
        if layout.reducer is not None:
            opt_state = CompressedOptState(opt_state, found.reducer)
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
    return CompiledStep(
        layout, on_state, check_no_deadlock(recipe, jitted_step), check_no_deadlock(recipe, jitted_evaluate)
    )
