"""The train step of a strategy: differentiate, update, gather; compiled per parameter structure at the first call."""

import functools
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, TrainState, abstract
from shardopt.engine._aliases import DonatedState
from shardopt.engine._compile import make_program
from shardopt.engine._compression import CompressedOptState, init_compression
from shardopt.engine._config import StrategyConfig
from shardopt.engine._gradients import make_gradients, make_loss
from shardopt.engine._layout import Layout, make_layout, shardings
from shardopt.engine._metrics import values
from shardopt.engine._offload import on_host, to_device, to_host
from shardopt.engine._optimizer import Metrics
from shardopt.engine._update import all_gather_params, apply_update, gradient_norm

_Compiled = TypeVar("_Compiled")
_Result = TypeVar("_Result", Metrics, tuple[TrainState, Metrics])


class Program(Protocol):
    """A function that is compiled at its first call."""

    def __call__(self, state: PyTree, batch: PyTree, /) -> PyTree:
        """Run the program on a train state, or its parameters, and a batch."""
        ...

    def lower(self, state: PyTree, batch: PyTree, /) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        ...


class CompiledStep(NamedTuple):
    """A strategy for one parameter structure: the placement of its train state, and its programs.

    Attributes:
      layout: where every leaf lives; if each replica trains by itself, where it lives within a replica.
      abstract: the train state as shapes and dtypes.
      specs: the train state as `PartitionSpec`.
      shardings: the same as `NamedSharding`.
      init_opt_state: `params -> opt_state`, the first optimizer state, in the global view.
      step: `(state, batch) -> (state, metrics)`, donating the state; metrics may still have a kind.
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
    out_shardings, in_shardings = (
        on_host(config, layout.abstract, state_shardings)
        for state_shardings in (config.home.shardings(layout.specs), shardings(config.mesh, layout.specs))
    )

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        def value_fn(params: PyTree) -> jax.Array:
            return loss(params, batch, state.step, state.rng)[0]

        opt_state, reducer_state = state.opt_state if compression is not None else (state.opt_state, None)
        if compression is not None:
            reducer_shardings = shardings(config.mesh, layout.specs.opt_state.reducer)
            reducer_state = to_device(config, reducer_state, reducer_shardings)
        result = gradients(state.params, batch, state.step, state.rng, reducer_state)
        params, opt_state = apply_update(config, layout, state.params, opt_state, result, value_fn)
        params = all_gather_params(config, layout, params)
        if compression is not None:
            reducer_state = to_host(config, result.reducer, in_shardings.opt_state.reducer)
            opt_state = CompressedOptState(opt_state, reducer_state)
        metrics = {"loss": result.loss, "grad_norm": gradient_norm(config, layout, result.grads), **result.metrics}
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    replicated = config.home.shardings(PartitionSpec())
    return CompiledStep(
        layout=layout,
        abstract=layout.abstract,
        specs=config.home.specs(layout.specs),
        shardings=out_shardings,
        init_opt_state=functools.partial(init_opt_state, config, layout),
        step=make_program(
            config, step, (in_shardings, None), (out_shardings, replicated), donated=DonatedState(config.mesh)
        ),
        evaluate=compile_evaluate(config, layout),
        synchronize=jax.block_until_ready,
    )


def init_opt_state(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Return the first optimizer state, together with the reducer's state if there is a reducer."""
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

    param_shardings = shardings(config.mesh, layout.specs.params)
    return make_program(config, evaluate, (param_shardings, None), config.home.shardings(PartitionSpec()))


class LayoutCache(Generic[_Compiled]):
    """A cache of compiled objects by parameter structure; it remembers the last one that was read."""

    def __init__(self, config: StrategyConfig, compile_for: Callable[[StrategyConfig, Layout], _Compiled]):
        self._config, self._compile = config, compile_for
        self._compiled: dict[Hashable, _Compiled] = {}
        self._last: _Compiled | None = None

    def of(self, params: PyTree) -> _Compiled:
        """Return the compiled object for these parameters, arrays or shapes."""
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._compiled:
            self._compiled[key] = self._compile(self._config, make_layout(self._config, abstract(params)))
        self._last = self._compiled[key]
        return self._last

    def last(self) -> _Compiled:
        """Return the compiled object that was read last.

        Raises:
          ValueError: if there is none.
        """
        if self._last is None:
            problem = "no parameters have been seen yet, so nothing can be said of their placement."
            fix = "call opt.init or opt.specs first, or pass the abstract parameters (jax.eval_shape gives them)."
            raise ValueError(format_error(self._config.strategy, problem, fix=fix))
        return self._last


StepCache = LayoutCache[CompiledStep]


def limit_in_flight(config: StrategyConfig) -> Callable[[_Result], _Result]:
    """Return a function that lets at most two calls run at a time on CPU, and does nothing on other platforms.

    Fake devices share one thread pool. Hundreds of queued programs with collectives can leave no thread for the device that
    the others wait for, and XLA ends the process after 40 seconds.
    """
    previous: list[Metrics | None] = [None]

    def wait(result: _Result) -> _Result:
        metrics = result[1] if isinstance(result, tuple) else result
        if not isinstance(metrics["loss"], Tracer):
            jax.block_until_ready(previous[0])
            previous[0] = metrics
        return result

    return wait if config.mesh.devices.flat[0].platform == "cpu" else lambda result: result
