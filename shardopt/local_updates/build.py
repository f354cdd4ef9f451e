"""From a strategy and how its replicas agree to the contract of every strategy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, TrainState
from shardopt.engine.batch import batch_sharding, check_batch, place_batch
from shardopt.engine.build import BatchFn
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import make_gradients
from shardopt.engine.layout import Layout, make_layout, shardings
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.state import check_placement, check_state, copied
from shardopt.engine.step import StepCache, abstract_params, check_no_deadlock, limit_in_flight
from shardopt.engine.update import all_gather_params, apply_update, gradient_norm
from shardopt.local_updates.outer_step import OuterStep, average, average_updated, of_first_row
from shardopt.local_updates.state import (
    REPLICA,
    Delayed,
    PerReplica,
    Replicas,
    SyncConfig,
    abstract_state,
    first_state,
    make_fragments,
    reducer_plans,
)
from shardopt.mesh import on_mesh

# The steps of replicas that train apart, one program a kind of step, compiled when first needed.


class StepVariant(NamedTuple):
    """What a step does besides training each replica.

    Attributes:
      warm: gradients are averaged over replicas.
      send: the fragment whose outer gradient is sent, or None: before the step where there is a delay, else after it.
      apply: the fragment whose outer update is applied after the step, or None.
    """

    warm: bool = False
    send: int | None = None
    apply: int | None = None


def variant_of(sync: SyncConfig, step: int) -> StepVariant:
    """Return the kind of the step that is taken from `step` to `step + 1`.

    Fragment f is due after steps (f + 1) H / P, then every H steps, counted from the end of the warm-up. It is sent
    then, from the parameters as they are after that step, and applied `delay` steps later. With a delay the sending is
    part of the next step's program, so that it can go on while the replicas train.
    """
    done = step + 1 - sync.warmup_steps
    if done <= 0:
        return StepVariant(warm=True)
    stride = sync.sync_every // len(sync.fragments)

    def due(after):
        turn = after % sync.sync_every or sync.sync_every
        return turn // stride - 1 if after > 0 and turn % stride == 0 else None

    if not sync.delay:
        return StepVariant(send=due(done), apply=due(done))
    return StepVariant(send=due(done - 1), apply=due(done - sync.delay))


def make_step(recipe: StrategyConfig, layout: Layout, sync: SyncConfig, placed: TrainState, kind: StepVariant) -> Any:
    """Return the jitted `(state, batch) -> (state, metrics)` of a kind; metrics have a row a replica."""
    recipe = recipe._replace(warm=kind.warm)
    gradients = make_gradients(recipe, layout)
    agreements = [OuterStep(recipe, layout, sync, fragment) for fragment in sync.fragments]
    before, after = (kind.send, None) if sync.delay else (None, kind.send)

    def value_fn(_):
        what = "a line search evaluates the loss at other parameters, which replicas that train apart cannot."
        raise ValueError(format_error(recipe.who, what, fix="use an optimizer without value_fn."))

    def update(params, opt_state, found):
        return apply_update(recipe, layout, params, opt_state, found, value_fn)

    def send(number, shared, own, replicas):
        wire = replicas.reducer[number] if replicas.reducer else None
        before = wire.now if isinstance(wire, Delayed) else wire
        delta, wire = agreements[number].send(shared, own, before)
        if replicas.reducer:
            wire = Delayed(wire, before) if sync.delay else wire
            replicas = replicas._replace(reducer=_replaced(replicas.reducer, number, wire))
        return delta, replicas

    def arrived(number, replicas):
        """What was sent cannot be taken back any more."""
        wire = replicas.reducer[number] if replicas.reducer else None
        if not isinstance(wire, Delayed):
            return replicas
        return replicas._replace(reducer=_replaced(replicas.reducer, number, Delayed(wire.now, copied(wire.now))))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        replicas: Replicas = state.opt_state
        flatten, unflatten = layout.treedef.flatten_up_to, layout.treedef.unflatten
        shared = flatten(state.params)
        if before is not None:
            delta, replicas = send(before, shared, flatten(replicas.params.value), replicas)
            replicas = replicas._replace(pending=_replaced(replicas.pending, before, delta))
        found = gradients(replicas.params.value, batch, state.step, state.rng, replicas.inner_reducer)
        wire, found = found.reducer, found._replace(reducer=None)
        run = jax.vmap(update, spmd_axis_name=REPLICA)
        params, optimizer = run(replicas.params.value, replicas.optimizer.value, found)
        own = flatten(all_gather_params(recipe, layout, params))
        if kind.warm:
            shared = of_first_row(recipe, layout, own)
        if kind.apply is not None:
            if after is not None:
                delta, replicas = send(after, shared, own, replicas)
            else:
                delta = replicas.pending[kind.apply]
            shared, own, outer = agreements[kind.apply].apply(shared, own, delta, replicas.outer[kind.apply])
            replicas = arrived(kind.apply, replicas._replace(outer=_replaced(replicas.outer, kind.apply, outer)))
        if kind.send is not None:
            shared, own = average_updated(recipe, layout, shared, own, found.updates)
        replicas = replicas._replace(
            params=PerReplica(unflatten(own)), optimizer=PerReplica(optimizer), inner_reducer=wire
        )
        metrics = {"loss": found.loss, "grad_norm": gradient_norm(recipe, layout, found.grads), **found.metrics}
        return TrainState(state.step + 1, unflatten(shared), replicas, state.rng), metrics

    by_replica = NamedSharding(recipe.mesh, PartitionSpec(REPLICA))
    jitted = jax.jit(
        on_mesh(recipe.mesh, step),
        in_shardings=(placed, batch_sharding(recipe)),
        out_shardings=(placed, by_replica),
        donate_argnums=0,
        keep_unused=True,  # what a step overwrites unread, such as what was on its way, gives its memory as well
    )
    return check_no_deadlock(recipe, jitted)


def make_average(recipe: StrategyConfig, layout: Layout, placed: TrainState) -> Any:
    """Return `state -> state`, jitted within, that makes all parameters the mean of the replicas'.

    What was on its way is dropped: the mean has it all, and to apply it later would count it twice. So the reducer goes
    back to before that was sent: what it left of it is in the mean as well, and what it had left of earlier sends,
    which is in no replica's parameters, it sends later as ever. Nothing is donated, and what does not change is handed
    on as it is, so that no copy of the optimizer's state is made.
    """
    where: Replicas = placed.opt_state

    def run(own: PerReplica, pending: Any, before: Any) -> tuple[Any, ...]:
        shared, rows = average(recipe, layout.plans, layout.treedef.flatten_up_to(own.value))
        unflatten = layout.treedef.unflatten
        nothing = jax.tree.map(jnp.zeros_like, pending)
        return unflatten(shared), PerReplica(unflatten(rows)), nothing, copied(before)

    jitted = jax.jit(
        on_mesh(recipe.mesh, run),
        in_shardings=(where.params, where.pending, _before(where)),
        out_shardings=(placed.params, where.params, where.pending, _before(where)),
    )

    def synchronize(state: TrainState) -> TrainState:
        replicas: Replicas = state.opt_state
        before = _before(replicas)
        shared, own, pending, now = jitted(replicas.params, replicas.pending, before)
        if before:
            replicas = replicas._replace(reducer=tuple(Delayed(*both) for both in zip(now, before, strict=True)))
        return state._replace(params=shared, opt_state=replicas._replace(params=own, pending=pending))

    return synchronize


def _before(replicas: Replicas) -> list[Any]:
    """Return what the reducers would go back to; nothing without a delay."""
    return [wire.before for wire in replicas.reducer or () if isinstance(wire, Delayed)]


def _replaced(items: tuple[Any, ...], at: int, new: Any) -> tuple[Any, ...]:
    return (*items[:at], new, *items[at + 1 :])


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
    sync: SyncConfig
    shardings: TrainState
    steps: dict[StepVariant, Any]
    average: Any


def build(who: str, strategy: ShardedOptimizer, *, fragments: int, reducer: Any, **how: Any) -> ShardedOptimizer:
    """Return the combination; `how` are the other fields of `Sync`."""
    recipe = strategy.config.recipe._replace(who=who, apart=True)
    programs, paced, made = StepCache(strategy.config.recipe), limit_in_flight(recipe), {}
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
            agreements = [OuterStep(recipe, placed.inner, placed.sync, one) for one in placed.sync.fragments]
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
            raise TypeError(format_error(who, what, fix="call step outside jit: it is compiled already."))
        # What this function returned last it need not read back from the device, which would wait for the step.
        # An abstract state gives the first step that replicas take by themselves.
        step = last[1] if state.step is last[0] else placed.sync.warmup_steps if abstract else int(state.step)
        kind = variant_of(placed.sync, step)
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
        step=BatchFn(run, lower),
        evaluate=BatchFn(evaluate, lower_evaluate),
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


def _place(recipe: StrategyConfig, layout: Layout, fragments: int, reducer: Any, how: dict[str, Any]) -> Placed:
    parts = make_fragments(recipe, layout.plans, fragments)
    sync = SyncConfig(fragments=parts, reducers=reducer_plans(recipe, layout, reducer, parts), **how)
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
