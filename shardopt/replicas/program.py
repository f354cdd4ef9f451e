"""The steps of replicas that train apart, one program a kind of step, compiled when first needed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, TrainState
from shardopt.mesh import on_mesh
from shardopt.replicas.agree import Agreement, average, average_updated, of_first_row
from shardopt.replicas.state import REPLICA, Delayed, PerReplica, Replicas, Sync
from shardopt.strategies.batch import batch_sharding
from shardopt.strategies.gradient_norm import gradient_norm
from shardopt.strategies.gradients import make_gradients
from shardopt.strategies.guard import guarded
from shardopt.strategies.init import copied
from shardopt.strategies.layout import Layout
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.update import apply_update, make_whole


class Kind(NamedTuple):
    """What a step does besides training each replica.

    Attributes:
      warm: gradients are averaged over replicas.
      send: the fragment whose outer gradient is sent, or None: before the step where there is a delay, else after it.
      apply: the fragment whose outer update is applied after the step, or None.
    """

    warm: bool = False
    send: int | None = None
    apply: int | None = None


def kind_of(sync: Sync, step: int) -> Kind:
    """Return the kind of the step that is taken from `step` to `step + 1`.

    Fragment f is due after steps (f + 1) H / P, then every H steps, counted from the end of the warm-up. It is sent
    then, from the parameters as they are after that step, and applied `delay` steps later. With a delay the sending is
    part of the next step's program, so that it can go on while the replicas train.
    """
    done = step + 1 - sync.warmup_steps
    if done <= 0:
        return Kind(warm=True)
    stride = sync.sync_every // len(sync.fragments)

    def due(after):
        turn = after % sync.sync_every or sync.sync_every
        return turn // stride - 1 if after > 0 and turn % stride == 0 else None

    if not sync.delay:
        return Kind(send=due(done), apply=due(done))
    return Kind(send=due(done - 1), apply=due(done - sync.delay))


def make_step(recipe: Recipe, layout: Layout, sync: Sync, placed: TrainState, kind: Kind) -> Any:
    """Return the jitted `(state, batch) -> (state, metrics)` of a kind; metrics have a row a replica."""
    recipe = recipe._replace(warm=kind.warm)
    gradients = make_gradients(recipe, layout)
    agreements = [Agreement(recipe, layout, sync, fragment) for fragment in sync.fragments]
    before, after = (kind.send, None) if sync.delay else (None, kind.send)

    def value_fn(_):
        what = "a line search evaluates the loss at other parameters, which replicas that train apart cannot."
        raise ValueError(complaint(recipe.who, what, fix="use an optimizer without value_fn."))

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
        own = flatten(make_whole(recipe, layout, params))
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
    return guarded(recipe, jitted)


def make_average(recipe: Recipe, layout: Layout, placed: TrainState) -> Any:
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
