"""The compiled programs of a strategy, for one parameter structure."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.core import PyTree, TrainState
from shardopt.losses._metrics import values
from shardopt.step._compile import AotCompiled, make_program
from shardopt.step._inputs import copied
from shardopt.step._optimizer import Metrics


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
      layout: where every leaf lives; if each replica trains by itself, where it lives within a
        replica.
      abstract: the train state as shapes and dtypes.
      specs: the train state as `PartitionSpec`.
      shardings: the same as `NamedSharding`.
      copy_params: `params -> params`, in memory of the state.
      init_opt_state: `params -> opt_state`, the first optimizer state, in the global view.
      step: `(state, batch) -> (state, metrics)`, donating the state; metrics may still have a kind.
      evaluate: `(params, batch) -> metrics`.
      synchronize: `state -> state`, all copies of it equal.
      step_with_norms: `(state, batch) -> (state, metrics, norms)`, a program of its own; None if
        replicas train apart.
    """

    layout: Layout
    abstract: TrainState
    specs: TrainState
    shardings: TrainState
    copy_params: AotCompiled
    init_opt_state: AotCompiled
    step: Program
    evaluate: Program
    synchronize: Callable[[TrainState], TrainState]
    step_with_norms: Program | None = None


def init_programs(
    config: StrategyConfig,
    layout: Layout,
    state_shardings: TrainState,
    init_opt_state: Callable[[PyTree], PyTree],
) -> dict[str, AotCompiled]:
    """Return the programs of `init`, so that all its calls share them."""
    in_shardings = (shardings(config.mesh, layout.specs.params),)

    # A copy, because a transformation that keeps the parameters in its state would return the same
    # buffers.
    def first_opt_state(params: PyTree) -> PyTree:
        return copied(init_opt_state(params))

    return {
        "copy_params": make_program(config, copied, in_shardings, state_shardings.params),
        "init_opt_state": make_program(
            config, first_opt_state, in_shardings, state_shardings.opt_state
        ),
    }


def compile_evaluate(config: StrategyConfig, layout: Layout) -> Program:
    """Return `(params, batch) -> metrics`, the loss and metrics of a batch without a random key."""
    loss = config.differentiate.loss(config.of_evaluation, layout)

    def evaluate(params: PyTree, batch: PyTree) -> Metrics:
        value, metrics = loss(params, batch)
        return {"loss": value, **values(metrics)}

    param_shardings = shardings(config.mesh, layout.specs.params)
    return make_program(
        config, evaluate, (param_shardings, None), config.home.shardings(PartitionSpec())
    )
