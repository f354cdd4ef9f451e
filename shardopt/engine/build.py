"""From a recipe to the contract: init, step and the rest, for every ring-1 strategy alike."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, TrainState
from shardopt.engine.batch import batch_sharding, check_batch, place_batch
from shardopt.engine.config import Placement, StrategyConfig, check_config
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.state import check_placement, check_state, init_state
from shardopt.engine.step import CompiledStep, StepCache, abstract_params, limit_in_flight
from shardopt.partition import Report, report
from shardopt.pipeline import Schedule
from shardopt.reducers import Reducer


class Config(NamedTuple):
    """How a strategy was built. `report(abstract_params=None)` gives the placement of every leaf.

    `schedule` is None where micro-batches run one after another, without a pipeline. `recipe` is what the strategy was
    built from, for combinators over strategies.
    """

    strategy: str
    mesh_shape: dict[str, int]
    placement: Placement
    micro_batches: int
    rules: Any
    min_shard_elements: int
    gather_dtype: str | None
    frozen: tuple[str, ...]
    schedule: Schedule | None
    remat: bool
    reducer: Reducer | None
    recipe: StrategyConfig
    report: Callable[..., Report]


@dataclasses.dataclass(frozen=True)
class BatchFn:
    """A compiled function of a train state and a batch: `opt.step` or `opt.evaluate`.

    The batch is a pytree with leaves [global batch, ...]: numpy arrays, which hold the whole global batch on every
    process, or jax arrays that are global already.

    Attributes:
      run: what a call does.
      lower: `lower(state, batch) -> jax.stages.Lowered`, also for abstract arguments.
    """

    run: Callable[[TrainState, PyTree], Any]
    lower: Callable[[TrainState, PyTree], Any]

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Run on a state and a batch."""
        return self.run(state, batch)


def build(recipe: StrategyConfig) -> ShardedOptimizer:
    """Check the recipe and return its optimizer; nothing is compiled before parameters are seen."""
    recipe = check_config(recipe)
    programs, paced = StepCache(recipe), limit_in_flight(recipe)

    def init(params: Any, rng: jax.Array | None = None) -> TrainState:
        """Create the train state, split, from parameters or from `init_fn(rng)`; `rng` also seeds the steps."""
        return init_state(recipe, programs, params, rng)

    def specs(abstract: PyTree) -> TrainState:
        """Return where every leaf of the train state lives, as `PartitionSpec`, without allocating anything."""
        return programs.of(abstract_params(recipe, abstract)).layout.specs

    def abstract_state(abstract: PyTree = None) -> TrainState:
        """Return the train state as `jax.ShapeDtypeStruct` with shardings, by default of the parameters last seen."""
        program = programs.last() if abstract is None else programs.of(abstract_params(recipe, abstract))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            program.layout.abstract,
            program.shardings,
        )

    def make_report(abstract: PyTree = None) -> Report:
        """Return the placement of every leaf, by default of the parameters last seen."""
        program = programs.last() if abstract is None else programs.of(abstract_params(recipe, abstract))
        layout, split = program.layout, recipe.placement
        return report(
            layout.plans,
            layout.specs,
            layout.abstract,
            mesh=recipe.mesh,
            params_split=split.params,
            state_split=split.opt_state,
            min_shard_elements=recipe.min_shard_elements,
        )

    return ShardedOptimizer(
        init=init,
        step=_on_batch(recipe, programs, lambda program, state: (program.step, state), paced),
        evaluate=_on_batch(recipe, programs, lambda program, state: (program.evaluate, state.params), paced),
        synchronize=jax.block_until_ready,
        specs=specs,
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
            gather_dtype=None if recipe.gather_dtype is None else str(jnp.dtype(recipe.gather_dtype)),
            frozen=tuple(recipe.frozen),
            schedule=recipe.schedule,
            remat=recipe.remat,
            reducer=recipe.reducer,
            recipe=recipe,
            report=make_report,
        ),
    )


def _on_batch(
    recipe: StrategyConfig,
    programs: StepCache,
    choose: Callable[[CompiledStep, TrainState], tuple[Any, PyTree]],
    paced: Callable[[Any], Any],
) -> BatchFn:
    """Make the function of a program's part: `choose(program, state)` gives it and what of the state it takes."""
    sharding = batch_sharding(recipe)
    known: set[int] = set()

    def prepare(state: TrainState, batch: PyTree) -> tuple[Any, PyTree, PyTree]:
        check_state(recipe, state)
        check_batch(recipe, batch)
        program = programs.of(state.params)
        if id(program) not in known:  # once: what a step returns lives where it should
            check_placement(recipe, program.layout, program.shardings, state)
            known.add(id(program))
        return *choose(program, state), place_batch(batch, sharding)

    def run(state: TrainState, batch: PyTree) -> Any:
        jitted, taken, placed = prepare(state, batch)
        return paced(jitted(taken, placed))

    def lower(state: TrainState, batch: PyTree) -> Any:
        jitted, taken, placed = prepare(state, batch)
        return jitted.lower(taken, placed)

    return BatchFn(run, lower)
