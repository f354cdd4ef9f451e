"""The train step of a strategy: differentiate, update, gather.

Compiled per parameter structure at the first call.
"""

import functools
import operator
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._offload import on_host
from shardopt.core import PyTree, TrainState
from shardopt.core._loss_parts import Gradients, StepMetrics
from shardopt.step._aliases import DonatedState
from shardopt.step._compile import make_program
from shardopt.step._norms import Norms, norms_of
from shardopt.step._opt_state import init_opt_state, join_opt_state, split_opt_state
from shardopt.step._programs import CompiledStep, Program, compile_evaluate, init_programs
from shardopt.step._results import AppliedUpdate, TakenStep
from shardopt.step._update import all_gather_params, apply_update


def compile_step(
    config: StrategyConfig,
    layout: Layout,
    report: Callable[[TakenStep], PyTree] = operator.attrgetter("metrics"),
) -> CompiledStep:
    """Return the programs of a synchronous strategy, whose step returns a state and its `report`."""
    take_step = make_step(config, layout)
    # A state comes in on the mesh with our axis names, and goes out on the mesh that the user made.
    # The devices are the same, so nothing moves.
    out_shardings, in_shardings = (
        on_host(config.update.offload, layout.abstract, state_shardings)
        for state_shardings in (
            config.home.shardings(layout.specs),
            shardings(config.mesh, layout.specs),
        )
    )
    replicated = config.home.shardings(PartitionSpec())
    donated = DonatedState(config.mesh)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, StepMetrics]:
        taken = take_step(state, batch)
        return taken.state, report(taken)

    def step_with_norms(state: TrainState, batch: PyTree) -> tuple[TrainState, StepMetrics, Norms]:
        taken = take_step(state, batch)
        return taken.state, taken.metrics, norms_of(config, layout, taken.update.change)

    def program(run: Callable[..., PyTree], *results: PyTree) -> Program:
        # None: the batch lies where `place_batch` put it, so its placement is no part of the
        # program.
        return make_program(
            config, run, (in_shardings, None), (out_shardings, *results), donated=donated
        )

    return CompiledStep(
        layout=layout,
        abstract=layout.abstract,
        specs=config.home.specs(layout.specs),
        shardings=out_shardings,
        **init_programs(
            config, layout, out_shardings, functools.partial(init_opt_state, config, layout)
        ),
        step=program(step, replicated),
        # A program compiles before its first call, so it costs nothing until somebody asks for
        # norms.
        step_with_norms=program(step_with_norms, replicated, replicated),
        evaluate=compile_evaluate(config, layout),
        synchronize=jax.block_until_ready,
    )


def make_step(config: StrategyConfig, layout: Layout) -> Callable[[TrainState, PyTree], TakenStep]:
    """Return the step, `(state, batch) -> TakenStep`, to be compiled."""
    differentiate = config.differentiate.gradients(config, layout)
    loss = config.differentiate.loss(config, layout)

    # A function and not a value: the loss is traced once more only if the optimizer calls it.
    def value_fn(state: TrainState, batch: PyTree) -> Callable[[PyTree], jax.Array]:
        return lambda params: loss(params, batch, state.step, state.rng)[0]

    def step(state: TrainState, batch: PyTree) -> TakenStep:
        opt_state, reducer_state = split_opt_state(config, layout, state.opt_state)
        # This phase all-gathers the parameters where the loss reads them, differentiates, and
        # reduces the gradients.
        gradients = differentiate(state.params, batch, state.step, state.rng, reducer_state)
        value = value_fn(state, batch)
        update = apply_update(config, layout, state.params, opt_state, gradients, value)
        params = all_gather_params(config, layout, update.params)
        opt_state = join_opt_state(config, layout, update, gradients)
        # The key stays. A step folds its number into it, so a restored run draws the same numbers.
        state = TrainState(state.step + 1, params, opt_state, state.rng)
        return TakenStep(state, metrics_of(config, layout, gradients, update), gradients, update)

    return step


def metrics_of(
    config: StrategyConfig,
    layout: Layout,
    gradients: Gradients,
    update: AppliedUpdate | None = None,
) -> StepMetrics:
    """Return the metrics of a step: the loss, the norm of the gradient, the metrics of the loss."""
    specs = layout.reduce.grad_specs(config, layout)
    specs_of_update = [plan.spec(sharded=config.placement.opt_state) for plan in layout.trained]
    grads = gradients.grads
    if update is not None and specs == specs_of_update:
        # XLA gathers an array once, for this norm and for an update that clips it
        grads = update.change.gradients
    return {
        "loss": gradients.loss,
        # The norm of the reduced gradient, before the optimizer clips it.
        "grad_norm": layout.reduce.norm(config, jax.tree.leaves(grads), specs),
        **gradients.metrics,
    }
