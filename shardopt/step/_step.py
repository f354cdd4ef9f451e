"""The train step of a strategy: differentiate, update, gather; compiled per parameter structure at the first call."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from shardopt.config._compression import CompressedOptState, init_compression
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._offload import on_host, to_device, to_host
from shardopt.core._types import Metric, PyTree, TrainState
from shardopt.losses._metrics import values
from shardopt.losses._parts import Gradients
from shardopt.step._aliases import DonatedState
from shardopt.step._compile import make_program
from shardopt.step._gradients import make_gradients, make_loss
from shardopt.step._norms import Norms, norms_of
from shardopt.step._optimizer import Metrics
from shardopt.step._update import Change, all_gather_params, apply_update, gradient_norm


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
      step_with_norms: `(state, batch) -> (state, metrics, norms)`, a program of its own; None if replicas train apart.
    """

    layout: Layout
    abstract: TrainState
    specs: TrainState
    shardings: TrainState
    init_opt_state: Callable[[PyTree], PyTree]
    step: Program
    evaluate: Program
    synchronize: Callable[[TrainState], TrainState]
    step_with_norms: Program | None = None


def compile_step(config: StrategyConfig, layout: Layout) -> CompiledStep:
    """Return the programs of a synchronous strategy."""
    take_step = make_step(config, layout)
    out_shardings, in_shardings = (
        on_host(config.update.offload, layout.abstract, state_shardings)
        for state_shardings in (config.home.shardings(layout.specs), shardings(config.mesh, layout.specs))
    )
    replicated, donated = config.home.shardings(PartitionSpec()), DonatedState(config.mesh)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array | Metric]]:
        taken = take_step(state, batch)
        return taken.state, taken.metrics

    def step_with_norms(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array | Metric], Norms]:
        taken = take_step(state, batch)
        return taken.state, taken.metrics, norms_of(config, layout, taken.change)

    def program(run: Callable[..., PyTree], *results: PyTree) -> Program:
        return make_program(config, run, (in_shardings, None), (out_shardings, *results), donated=donated)

    return CompiledStep(
        layout=layout,
        abstract=layout.abstract,
        specs=config.home.specs(layout.specs),
        shardings=out_shardings,
        init_opt_state=functools.partial(init_opt_state, config, layout),
        step=program(step, replicated),
        step_with_norms=program(step_with_norms, replicated, replicated),
        evaluate=compile_evaluate(config, layout),
        synchronize=jax.block_until_ready,
    )


class TakenStep(NamedTuple):
    """What a step computes, before it is compiled.

    Attributes:
      state: the next train state.
      metrics: loss, norm of the gradient, and the metrics that the loss returns.
      gradients: the reduced gradients.
      updated: the parameters before their gather.
      change: the gradients, updates and parameters of the optax update.
    """

    state: TrainState
    metrics: dict[str, jax.Array | Metric]
    gradients: Gradients
    updated: PyTree
    change: Change


def make_step(config: StrategyConfig, layout: Layout) -> Callable[[TrainState, PyTree], TakenStep]:
    """Return the step, `(state, batch) -> TakenStep`, to be compiled."""
    differentiate, loss = make_gradients(config, layout), make_loss(config, layout)

    def value_fn(state: TrainState, batch: PyTree) -> Callable[[PyTree], jax.Array]:
        return lambda params: loss(params, batch, state.step, state.rng)[0]

    def step(state: TrainState, batch: PyTree) -> TakenStep:
        opt_state, reducer_state = _split_opt_state(config, layout, state.opt_state)
        # This phase all-gathers the parameters where the loss reads them, differentiates, and reduces the gradients.
        gradients = differentiate(state.params, batch, state.step, state.rng, reducer_state)
        updated, opt_state, change = apply_update(
            config, layout, state.params, opt_state, gradients, value_fn(state, batch)
        )
        params = all_gather_params(config, layout, updated)
        opt_state = _join_opt_state(config, layout, opt_state, gradients.reducer)
        new_state = TrainState(state.step + 1, params, opt_state, state.rng)
        return TakenStep(new_state, metrics_of(config, layout, gradients), gradients, updated, change)

    return step


def metrics_of(config: StrategyConfig, layout: Layout, gradients: Gradients) -> dict[str, jax.Array | Metric]:
    """Return the metrics of a step: the loss, the norm of the gradient, and the metrics that the loss returns."""
    return {"loss": gradients.loss, "grad_norm": gradient_norm(config, layout, gradients.grads), **gradients.metrics}


def _split_opt_state(config: StrategyConfig, layout: Layout, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Return the state of the optimizer, and the state of the reducer on the device; None without a reducer."""
    if layout.compression is None:
        return opt_state, None
    reducer_shardings = shardings(config.mesh, layout.specs.opt_state.reducer)
    return opt_state.optimizer, to_device(config.update.offload, opt_state.reducer, reducer_shardings)


def _join_opt_state(config: StrategyConfig, layout: Layout, opt_state: PyTree, reducer_state: PyTree) -> PyTree:
    """Return the optimizer state of the train state: the inverse of `_split_opt_state`."""
    if layout.compression is None:
        return opt_state
    on_device = shardings(config.mesh, layout.specs.opt_state.reducer)
    return CompressedOptState(
        opt_state, to_host(config.update.offload, layout.abstract.opt_state.reducer, reducer_state, on_device)
    )


def init_opt_state(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Return the first optimizer state, together with the reducer's state if there is a reducer."""
    opt_state = config.update.tx.init(layout.trainable(params))
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
