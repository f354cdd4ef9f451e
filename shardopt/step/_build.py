"""Build a strategy: from a config to `init`, `step` and the other functions of a
`ShardedOptimizer`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from shardopt.config._check import check_config
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._slots import StepSlots
from shardopt.core import PyTree, TrainState
from shardopt.core._loss_parts import StepMetrics
from shardopt.core._tracebacks import api_boundary
from shardopt.losses._metrics import values
from shardopt.losses._view import Views
from shardopt.partition import Report
from shardopt.step._average import EvaluationFn
from shardopt.step._cache import LayoutCache, limit_in_flight
from shardopt.step._check_programs import check_has_norms
from shardopt.step._global_rows import Rows, rows_of
from shardopt.step._host_values import States
from shardopt.step._init import first_state
from shardopt.step._inputs import check_alive, check_batch, check_params, check_values, place_batch
from shardopt.step._norms import Norms
from shardopt.step._optimizer import Metrics, NotPickled, ShardedOptimizer
from shardopt.step._programs import CompiledStep, Program
from shardopt.step._repeats import Repeats
from shardopt.step._report import Reports
from shardopt.step._step import compile_step
from shardopt.step._step_counter import StepCounter

StepCache = LayoutCache[CompiledStep]


@dataclasses.dataclass(frozen=True)
class BatchFn(NotPickled):
    """A compiled function of a train state and a batch: `opt.evaluate`, or `opt.step`, a `TrainFn`.

    The batch is a pytree with leaves [rows, ...]. They are numpy arrays with the rows of this
    process, or `so.GlobalRows` of arrays with the rows of all processes. Or they are jax arrays
    that are global already.

    Attributes:
      prepare: checks a state and a batch, and returns the program and its arguments.
      limit: limits the number of calls that run at the same time.
      states: places values of the host in a state.
    """

    prepare: Callable[[TrainState, PyTree], tuple[Program, tuple[PyTree, PyTree]]]
    limit: Callable[[PyTree], PyTree]
    states: States

    @api_boundary
    def __call__(self, state: TrainState, batch: PyTree) -> PyTree:
        """Run on a state and a batch."""
        return self.states.call(self._run, state, batch)

    def _run(self, state: TrainState, batch: PyTree) -> PyTree:
        program, args = self.prepare(state, batch)
        return self.limit(program(*args))

    @api_boundary
    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        program, args = self.prepare(state, batch)
        return program.lower(*args)


class NormsFn(BatchFn):
    """`opt.step.with_norms`."""

    @api_boundary
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics, Norms]:
        """Take a step; return metrics and norms as well."""
        state, metrics, norms = super().__call__(state, batch)
        return state, values(metrics), norms


@dataclasses.dataclass(frozen=True)
class TrainFn(BatchFn):
    """`opt.step`.

    Attributes:
      place: checks a state and a batch, and returns the view of the loss and the placed batch.
      with_norms: the same step, which also returns norms of each leaf.
      repeats: takes steps like earlier ones.
    """

    place: Callable[[TrainState, PyTree], tuple[str, PyTree]]
    with_norms: NormsFn
    repeats: Repeats

    @api_boundary
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take a step; metrics are arrays."""
        state, metrics = self.with_kinds(state, batch)
        return state, values(metrics)

    @api_boundary
    def with_kinds(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepMetrics]:
        """Take a step and return metrics with their kinds, `Sum`, `Max` or `Min`."""
        result = self.repeats.take(state, batch)
        if result is not None:
            return self.limit(result)
        return self.states.call(self._run, state, batch)

    def _run(self, state: TrainState, batch: PyTree) -> PyTree:
        program, args = self.prepare(state, batch)
        result = self.limit(program(*args))
        self.repeats.learn(batch, program, args[1])
        return result


class Intake(NamedTuple):
    """How batches come into steps, or into evaluations.

    Attributes:
      config: of the steps or the evaluations.
      views: chooses the view of each batch shape.
      rows: joins the batches of several processes.
    """

    config: StrategyConfig
    views: Views
    rows: Rows


def intake_of(config: StrategyConfig, *, training: bool) -> Intake:
    """Return how batches come into the steps of a config, or into its evaluations."""
    return Intake(config, Views(config, training=training), rows_of(config, config.strategy))


@dataclasses.dataclass(frozen=True, eq=False)
class StrategyFunctions(NotPickled):
    """The functions of a `ShardedOptimizer`; nothing is compiled before the first parameters.

    Attributes:
      config: the checked arguments of the strategy.
      caches: the compiled programs, by view and by parameter structure.
      cache: the programs to use before the view of a batch is known.
      steps: how batches come into steps.
      evaluations: how batches come into evaluations.
      states: checks states, and places their values of the host.
      counter: refuses a step whose number would wrap.
      reports: the placements of leaves.
    """

    config: StrategyConfig
    caches: dict[str, StepCache]
    cache: StepCache
    steps: Intake
    evaluations: Intake
    states: States
    counter: StepCounter
    reports: Reports

    def init(self, params: PyTree, rng: jax.Array | None = None) -> TrainState:
        """Create the train state, sharded, from parameters or from `init_fn(rng)`.

        `rng` also seeds the steps.
        """
        return first_state(self.config, self.cache, params, rng, rows=self.steps.rows)

    def prepare(
        self, state: TrainState, batch: PyTree, intake: Intake
    ) -> tuple[CompiledStep, TrainState, PyTree]:
        """Check and place a state and a batch; return them after the programs for the batch."""
        state = self.states.first_ready(state)
        view, placed = self.prepare_batch(state, batch, intake)
        return self.caches[view].of(state.params), state, placed

    def prepare_batch(self, state: TrainState, batch: PyTree, intake: Intake) -> tuple[str, PyTree]:
        """Check a batch for a state; return the view of the batch, and the placed batch."""
        batch = intake.rows.join(batch)
        check_alive(self.config, batch)
        layout = self.cache.of(state.params).layout
        runs_at_once = check_batch(
            self.config, batch, functools.partial(intake.views.mixes_rows, layout, batch)
        )
        check_values(intake.config, batch)
        placed = place_batch(self.config, batch)
        view = "global" if runs_at_once else intake.views.of(layout, placed)
        return view, placed

    def place(self, state: TrainState, batch: PyTree) -> tuple[str, PyTree]:
        """Check a state and a batch; return the view of the batch, and the placed batch."""
        return self.prepare_batch(self.states.ready(state), batch, self.steps)

    def prepare_step(
        self, state: TrainState, batch: PyTree, *, with_norms: bool = False
    ) -> tuple[Program, tuple[PyTree, PyTree]]:
        """Return the program of a step and its arguments; the step may also return norms."""
        if with_norms:
            check_has_norms(self.config)
        compiled, state, placed = self.prepare(state, batch, self.steps)
        self.counter.check(state)
        program = compiled.step_with_norms if with_norms else compiled.step
        assert program is not None
        return program, (state, placed)

    def prepare_evaluate(
        self, state: TrainState, batch: PyTree
    ) -> tuple[Program, tuple[PyTree, PyTree]]:
        """Return the program of an evaluation and its arguments."""
        compiled, state, placed = self.prepare(state, batch, self.evaluations)
        return compiled.evaluate, (state.params, placed)

    def synchronize(self, state: TrainState) -> TrainState:
        """Return the state once all its copies are complete and equal; nothing is donated."""
        state = self.states.ready(state)
        return jax.block_until_ready(self.cache.of(state.params).synchronize(state))

    def compiled_step(self, abstract_params: PyTree = None) -> CompiledStep:
        """Return the programs of these parameters, by default of the last ones."""
        if abstract_params is None:
            return self.cache.last()
        return self.cache.of(check_params(self.config, abstract_params))

    def specs(self, abstract_params: PyTree) -> TrainState:
        """Return where every leaf of the train state lives, as `PartitionSpec`; allocate nothing."""
        return self.cache.of(check_params(self.config, abstract_params)).specs

    def abstract_state(self, abstract_params: PyTree = None) -> TrainState:
        """Return the train state as `jax.ShapeDtypeStruct` with shardings, by default for the last
        parameters.
        """
        compiled = self.compiled_step(abstract_params)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            compiled.abstract,
            compiled.shardings,
        )

    def report(self, abstract_params: PyTree = None) -> Report:
        """Return the placement of all leaves in a replica, by default of the last parameters."""
        return self.reports.of(self.compiled_step(abstract_params).layout)


def build(
    config: StrategyConfig,
    fill: Callable[[StrategyConfig], StepSlots] | None = None,
    compile_step: Callable[[StrategyConfig, Layout], CompiledStep] = compile_step,
) -> ShardedOptimizer:
    """Check the config and return its optimizer.

    Args:
      config: the arguments of the strategy.
      fill: fills the slots of the step; None if a combinator passes a config with slots.
      compile_step: makes the programs for one parameter structure.
    """
    config = check_config(config)
    if fill is not None:
        config = config._replace(filled=fill(config))
    caches = {
        view: StepCache(config.replace(view=view), compile_step)
        for view in ("per_device", "global")
    }
    # Both views place the train state alike. So layout, specs and `synchronize` come from one
    # cache, and the view of a batch can be chosen with it.
    cache = caches["global" if config.loss.view == "global" else "per_device"]
    steps = intake_of(config, training=True)
    evaluations = intake_of(config.of_evaluation, training=False)
    states = States(config, cache)
    counter = StepCounter(config)
    limit = limit_in_flight(config)
    functions = StrategyFunctions(
        config, caches, cache, steps, evaluations, states, counter, Reports(config, steps.views)
    )
    count = counter.counting(limit)
    return ShardedOptimizer(
        init=api_boundary(functions.init),
        step=TrainFn(
            functions.prepare_step,
            count,
            states,
            functions.place,
            NormsFn(functools.partial(functions.prepare_step, with_norms=True), count, states),
            Repeats(config, cache, counter, steps.rows),
        ),
        evaluate=EvaluationFn(BatchFn(functions.prepare_evaluate, limit, states)),
        synchronize=api_boundary(functions.synchronize),
        specs=api_boundary(functions.specs),
        abstract_state=api_boundary(functions.abstract_state),
        wrapped=config.update.tx,
        mesh=config.home.mesh,
        config=config._replace(report=functions.report),
    )
