"""From a strategy and how its replicas agree to the contract of every strategy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from shardopt.core.errors import complaint
from shardopt.core.optimizer import ShardedOptimizer
from shardopt.core.types import PyTree, TrainState
from shardopt.mesh import on_mesh
from shardopt.replicas.agree import Agreement
from shardopt.replicas.fragments import make_fragments
from shardopt.replicas.program import Kind, kind_of, make_average, make_step
from shardopt.replicas.state import Sync, abstract_state, first_state, reducer_plans
from shardopt.strategies.batch import batch_sharding, check_batch, place_batch
from shardopt.strategies.build import OnBatch
from shardopt.strategies.init import copied
from shardopt.strategies.layout import Layout, make_layout, shardings
from shardopt.strategies.programs import Programs, abstract_params, pace
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.state import check_placement, check_state


class ReplicaConfig(NamedTuple):
    """How replicas were combined. `inner` is the configuration of the strategy, `report` its report."""

    strategy: str
    mesh_shape: dict[str, int]
    inner: Any
    sync_every: int
    warmup_steps: int
    fragments: int
    delay: int
    mix: float
    reducer: Any
    report: Callable[..., Any]

    @property
    def schedule(self) -> Any:
        """The schedule of each replica's pipeline, or None."""
        return self.inner.schedule


class Placed(NamedTuple):
    """Everything that depends on the structure of the parameters.

    Attributes:
      inner: the layout of one replica.
      layout: the same with the train state of all replicas.
      sync: how they agree.
      shardings: the train state as `NamedSharding`.
      steps: the programs made so far.
      average: makes all replicas equal.
    """

    inner: Layout
    layout: Layout
    sync: Sync
    shardings: TrainState
    steps: dict[Kind, Any]
    average: Any


def build(who: str, strategy: ShardedOptimizer, *, fragments: int, reducer: Any, **how: Any) -> ShardedOptimizer:
    """Return the combination; `how` are the other fields of `Sync`."""
    recipe = strategy.config.recipe._replace(who=who, apart=True)
    programs, paced, made = Programs(strategy.config.recipe), pace(recipe), {}
    sharding, last, known = batch_sharding(recipe), [None, 0], set()

    def of(params: PyTree) -> Placed:
        program = programs.of(params)
        if id(program) not in made:
            layout = make_layout(recipe, program.layout.abstract.params)
            made[id(program)] = _place(recipe, layout, fragments, reducer, how)
        return made[id(program)]

    def init(params: Any, rng: jax.Array | None = None) -> TrainState:
        """Create the train state, all replicas equal, from parameters or from `init_fn(rng)`."""
        state = strategy.init(params, rng)
        placed = of(state.params)

        def make(state):
            leaves = placed.inner.treedef.flatten_up_to(state.params)
            agreements = [Agreement(recipe, placed.inner, placed.sync, one) for one in placed.sync.fragments]
            parts = [one.take(leaves) for one in agreements]
            return copied(first_state(recipe, placed.inner, placed.sync, state, parts))

        opt_state = jax.jit(on_mesh(recipe.mesh, make), out_shardings=placed.shardings.opt_state)(state)
        return state._replace(opt_state=opt_state)

    def prepare(state: TrainState, batch: PyTree) -> tuple[Any, PyTree, int]:
        check_state(recipe, state)
        check_batch(recipe, batch)
        placed = of(state.params)
        if id(placed) not in known:  # once: what a step returns lives where it should
            check_placement(recipe, placed.layout, placed.shardings, state)
            known.add(id(placed))
        abstract = isinstance(state.step, jax.ShapeDtypeStruct)
        if isinstance(state.step, Tracer):
            what = "which program a step runs depends on state.step, which is traced here."
            raise TypeError(complaint(who, what, fix="call step outside jit: it is compiled already."))
        # What this function returned last it need not read back from the device, which would wait for the step.
        # An abstract state gives the first step that replicas take by themselves.
        step = last[1] if state.step is last[0] else placed.sync.warmup_steps if abstract else int(state.step)
        kind = kind_of(placed.sync, step)
        if kind not in placed.steps:
            placed.steps[kind] = make_step(recipe, placed.inner, placed.sync, placed.shardings, kind)
        return placed.steps[kind], place_batch(batch, sharding), step

    def run(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        program, rows, step = prepare(state, batch)
        state, metrics = paced(program(state, rows))
        last[:] = [state.step, step + 1]
        return state, {name: _mean_here(value) for name, value in metrics.items()}

    def lower(state: TrainState, batch: PyTree) -> Any:
        program, rows, _ = prepare(state, batch)
        return program.lower(state, rows)

    def evaluate(state: TrainState, batch: PyTree) -> dict[str, Any]:
        check_state(recipe, state)
        check_batch(recipe, batch)
        return paced(programs.of(state.params).evaluate(state.params, place_batch(batch, sharding)))

    def lower_evaluate(state: TrainState, batch: PyTree) -> Any:
        check_batch(recipe, batch)
        return programs.of(state.params).evaluate.lower(state.params, place_batch(batch, sharding))

    def synchronize(state: TrainState) -> TrainState:
        """Make all replicas, and the shared parameters, the mean of the replicas; wait for the devices.

        Nothing is donated: the state given can be trained on. The two share what is in both, so a step from one of
        them uses up the other.
        """
        check_state(recipe, state)
        return jax.block_until_ready(of(state.params).average(state))

    def specs(abstract: PyTree) -> TrainState:
        """Return where every leaf of the train state lives, as `PartitionSpec`, without allocating anything."""
        return of(abstract_params(recipe, abstract)).layout.specs

    def abstract_train_state(abstract: PyTree = None) -> TrainState:
        """Return the train state as `jax.ShapeDtypeStruct` with shardings, by default of the parameters last seen."""
        params = programs.last().layout.abstract.params if abstract is None else abstract_params(recipe, abstract)
        placed = of(params)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            placed.layout.abstract,
            placed.shardings,
        )

    def report(abstract: PyTree = None) -> Any:
        """Return the placement within a replica, by default of the parameters last seen."""
        return strategy.config.report(programs.last().layout.abstract.params if abstract is None else abstract)

    return ShardedOptimizer(
        init=init,
        step=OnBatch(run, lower),
        evaluate=OnBatch(evaluate, lower_evaluate),
        synchronize=synchronize,
        specs=specs,
        abstract_state=abstract_train_state,
        wrapped=recipe.tx,
        mesh=recipe.mesh,
        config=ReplicaConfig(
            strategy=who,
            mesh_shape=dict(recipe.mesh.shape),
            inner=strategy.config,
            sync_every=how["sync_every"],
            warmup_steps=how["warmup_steps"],
            fragments=fragments,
            delay=how["delay"],
            mix=how["mix"],
            reducer=reducer,
            report=report,
        ),
    )


def _place(recipe: Recipe, layout: Layout, fragments: int, reducer: Any, how: dict[str, Any]) -> Placed:
    parts = make_fragments(recipe, layout.plans, fragments)
    sync = Sync(fragments=parts, reducers=reducer_plans(recipe, layout, reducer, parts), **how)
    abstract, specs = abstract_state(recipe, layout, sync)
    placed = shardings(recipe.mesh, specs)
    whole = layout._replace(abstract=abstract, specs=specs)
    return Placed(layout, whole, sync, placed, {}, make_average(recipe, layout, placed))


def _mean_here(values: jax.Array) -> jax.Array:
    """Return the mean over the replicas that this process holds: asking the others would make it wait for them."""
    if not isinstance(values, jax.Array):
        return values
    shards = {shard.index[0].start or 0: shard.data for shard in values.addressable_shards}
    first = next(iter(shards.values()))
    if len(shards) == 1:
        return first[0]
    device = next(iter(first.devices()))
    return jnp.mean(jnp.concatenate([jax.device_put(data, device) for data in shards.values()]), axis=0)
