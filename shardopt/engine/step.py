"""The train step of a strategy: differentiate, update, gather; compiled per parameter structure when first needed."""

import functools
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, TrainState, abstract
from shardopt.engine.aliases import DonatedState
from shardopt.engine.compile import make_program
from shardopt.engine.compression import CompressedOptState, init_compression
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import make_gradients, make_loss
from shardopt.engine.layout import Layout, make_layout, shardings
from shardopt.engine.metrics import values
from shardopt.engine.offload import on_host, to_device, to_host
from shardopt.engine.optimizer import Metrics
from shardopt.engine.update import all_gather_params, apply_update, gradient_norm

_Compiled = TypeVar("_Compiled")
_Result = TypeVar("_Result", Metrics, tuple[TrainState, Metrics])


class Program(Protocol):
    """A function that is compiled when it is first called."""

    def __call__(self, state: PyTree, batch: PyTree, /) -> PyTree:
        """Run it on a train state, or its parameters, and a batch."""
        ...

    def lower(self, state: PyTree, batch: PyTree, /) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        ...


class CompiledStep(NamedTuple):
    """A strategy for one parameter structure: where its train state lives, and its programs.

    Attributes:
      layout: where every leaf lives; where replicas train apart, within one of them.
      abstract: the train state as shapes and dtypes.
      specs: the train state as `PartitionSpec`.
      shardings: the same as `NamedSharding`.
      init_opt_state: `params -> opt_state`, the first optimizer state, in the global view.
      step: `(state, batch) -> (state, metrics)`, donating the state; metrics may still say what kind they are.
      evaluate: `(params, batch) -> metrics`.
      synchronize: `state -> state`, all copies of it equal.
    """

    layout: Layout
    abstract: TrainState
    specs: TrainState
    shardings: TrainState
    init_opt_state: Callable[[PyTree], PyTree]
    step: Program
    evaluate: Program
    synchronize: Callable[[TrainState], TrainState]


def compile_step(config: StrategyConfig, layout: Layout) -> CompiledStep:
    """Return the programs of a synchronous strategy."""
    gradients, loss = make_gradients(config, layout), make_loss(config, layout)
    compression = layout.compression
    on_state, on_entry = (
        on_host(config, layout.abstract, where)
        for where in (config.home.shardings(layout.specs), shardings(config.mesh, layout.specs))
    )

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        def value_fn(params: PyTree) -> jax.Array:
            return loss(params, batch, state.step, state.rng)[0]

        opt_state, reducer_state = state.opt_state if compression is not None else (state.opt_state, None)
        if compression is not None:
            on_device = shardings(config.mesh, layout.specs.opt_state.reducer)
            reducer_state = to_device(config, reducer_state, on_device)
        found = gradients(state.params, batch, state.step, state.rng, reducer_state)
        params, opt_state = apply_update(config, layout, state.params, opt_state, found, value_fn)
        params = all_gather_params(config, layout, params)
        if compression is not None:
            reducer_state = to_host(config, found.reducer, on_entry.opt_state.reducer)
            opt_state = CompressedOptState(opt_state, reducer_state)
        metrics = {"loss": found.loss, "grad_norm": gradient_norm(config, layout, found.grads), **found.metrics}
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    replicated = config.home.shardings(PartitionSpec())
    return CompiledStep(
        layout=layout,
        abstract=layout.abstract,
        specs=config.home.specs(layout.specs),
        shardings=on_state,
        init_opt_state=functools.partial(init_opt_state, config, layout),
        step=make_program(config, step, (on_entry, None), (on_state, replicated), donated=DonatedState(config.mesh)),
        evaluate=compile_evaluate(config, layout),
        synchronize=jax.block_until_ready,
    )


def init_opt_state(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Return the first optimizer state, and that of a reducer beside it."""
    opt_state = config.tx.init(layout.trainable(params))
    return (
        opt_state if layout.compression is None else CompressedOptState(opt_state, init_compression(layout.compression))
    )


def compile_evaluate(config: StrategyConfig, layout: Layout) -> Program:
    """Return `(params, batch) -> metrics`, the loss and metrics of a batch without a random key."""
    loss = make_loss(config.of_evaluation, layout)

    def evaluate(params: PyTree, batch: PyTree) -> Metrics:
        value, metrics = loss(params, batch)
        return {"loss": value, **values(metrics)}

    on_params = shardings(config.mesh, layout.specs.params)
    return make_program(config, evaluate, (on_params, None), config.home.shardings(PartitionSpec()))


class LayoutCache(Generic[_Compiled]):
    """What is compiled for one parameter structure, of each; it remembers which was asked for last."""

    def __init__(self, config: StrategyConfig, compile_for: Callable[[StrategyConfig, Layout], _Compiled]):
        self._config, self._compile = config, compile_for
        self._made: dict[Hashable, _Compiled] = {}
        self._last: _Compiled | None = None

    def of(self, params: PyTree) -> _Compiled:
        """Return what belongs to parameters as jax holds them, or as `abstract_params` gives them."""
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._made:
            self._made[key] = self._compile(self._config, make_layout(self._config, abstract(params)))
        self._last = self._made[key]
        return self._last

    def last(self) -> _Compiled:
        """Return what was last asked for.

        Raises:
          ValueError: if there is none.
        """
        if self._last is None:
            what = "no parameters have been seen yet, so nothing can be said of their placement."
            fix = "call opt.init or opt.specs first, or pass the abstract parameters (jax.eval_shape gives them)."
            raise ValueError(format_error(self._config.strategy, what, fix=fix))
        return self._last


StepCache = LayoutCache[CompiledStep]


def limit_in_flight(config: StrategyConfig) -> Callable[[_Result], _Result]:
    """Return what lets at most two calls be under way on CPU, and does nothing elsewhere.

    Fake devices share one thread pool: hundreds of queued programs with collectives can leave no thread for the
    device that the others wait for, and XLA ends the process after 40 seconds.
    """
    previous: list[Metrics | None] = [None]

    def wait(result: _Result) -> _Result:
        metrics = result[1] if isinstance(result, tuple) else result
        if not isinstance(metrics["loss"], Tracer):
            jax.block_until_ready(previous[0])
            previous[0] = metrics
        return result

    return wait if config.mesh.devices.flat[0].platform == "cpu" else lambda result: result
