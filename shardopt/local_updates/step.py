"""The steps of replicas that train apart: one program per variant of a step, compiled when first needed."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardopt.core.errors import format_error
from shardopt.core.types import Max, Min, PyTree, Sum, TrainState
from shardopt.engine.aliases import DonatedState
from shardopt.engine.compile import AotCompiled, make_program
from shardopt.engine.config import StrategyConfig, SyncConfig
from shardopt.engine.gradients import make_gradients
from shardopt.engine.inputs import copied
from shardopt.engine.layout import Layout, shardings
from shardopt.engine.metrics import combined, value_of, values
from shardopt.engine.optimizer import Metrics
from shardopt.engine.step import CompiledStep, compile_evaluate, init_opt_state
from shardopt.engine.update import all_gather_params, apply_update, gradient_norm
from shardopt.local_updates.outer_step import OuterStep, average, average_updated, take_own
from shardopt.local_updates.state import (
    REPLICA,
    Delayed,
    LocalLayout,
    PerReplica,
    Replicas,
    abstract_state,
    first_opt_state,
    make_local_layout,
)


def compile_local_step(config: StrategyConfig, layout: Layout) -> CompiledStep:
    """Return the programs of replicas that train apart; `layout` is that of one replica."""
    local = make_local_layout(config, layout)
    abstract, specs = abstract_state(local)

    def init_replicas(params: PyTree) -> Replicas:
        leaves = layout.treedef.flatten_up_to(params)
        parts = [OuterStep(local, fragment).take(leaves) for fragment in local.fragments]
        return first_opt_state(local, params, init_opt_state(config, layout, params), parts)

    return CompiledStep(
        layout=layout,
        abstract=abstract,
        specs=config.home.specs(specs),
        shardings=config.home.shardings(specs),
        init_opt_state=init_replicas,
        step=LocalStep(local, specs),
        evaluate=compile_evaluate(config, layout),
        synchronize=make_average(local, specs),
    )


class LocalStep:
    """`(state, batch) -> (state, metrics)`: runs the program of the variant that `state.step` asks for.

    It keeps a copy on the host of the step that it returned last, which it need not read back from the device: that
    would wait for the step.
    """

    def __init__(self, local: LocalLayout, specs: TrainState):
        self.local, self.specs = local, specs
        self._programs: dict[StepVariant, AotCompiled] = {}
        self._last_step: tuple[jax.Array | None, int] = (None, 0)
        self._donated = DonatedState(local.config.mesh)  # of all variants: each is handed what another returned

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take a step; metrics are those of the replicas of this process: their mean, sum, largest or smallest."""
        step = self._step_of(state)
        state, metrics = self._program(step)(state, batch)
        self._last_step = (state.step, step + 1)
        return state, {name: _of_replicas_here(value) for name, value in metrics.items()}

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program; an abstract state gives the first step that replicas take by themselves."""
        return self._program(self._step_of(state)).lower(state, batch)

    def _program(self, step: int) -> AotCompiled:
        variant = variant_of(self.local.sync, step)
        if variant not in self._programs:
            self._programs[variant] = make_step(self.local, self.specs, variant, self._donated)
        return self._programs[variant]

    def _step_of(self, state: TrainState) -> int:
        if isinstance(state.step, Tracer):
            problem = "which program a step runs depends on state.step, which is traced here."
            fix = "call step outside jit: it is compiled already."
            raise TypeError(format_error(self.local.config.strategy, problem, fix=fix))
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return self.local.sync.warmup_steps
        array, step = self._last_step
        if state.step is array:
            return step
        with jax.transfer_guard("allow"):
            return int(state.step)


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
    """Return the variant of the step that is taken from `step` to `step + 1`.

    Fragment f is due after steps (f + 1) H / P, then every H steps, counted from the end of the warm-up. It is sent
    then, from the parameters as they are after that step, and applied `delay` steps later. With a delay the sending is
    part of the next step's program, so that it can go on while the replicas train.
    """
    done = step + 1 - sync.warmup_steps
    if done <= 0:
        return StepVariant(warm=True)
    stride = sync.stride

    def due(after):
        turn = after % sync.sync_every or sync.sync_every
        return turn // stride - 1 if after > 0 and turn % stride == 0 else None

    if not sync.delay:
        return StepVariant(send=due(done), apply=due(done))
    return StepVariant(send=due(done - 1), apply=due(done - sync.delay))


def make_step(
    local: LocalLayout, specs: TrainState, variant: StepVariant, donated: DonatedState | None = None
) -> AotCompiled:
    """Return the jitted `(state, batch) -> (state, metrics)` of a variant; metrics are stacked, one a replica."""
    donated = donated or DonatedState(local.config.mesh)
    config, layout, delay = local.config._replace(sync_gradients=variant.warm), local.layout, local.sync.delay
    together = variant.warm and config.view == "global"  # one loss of the whole batch, at parameters that are equal yet
    gradients = make_gradients(config._replace(local_updates=None) if together else config, layout)
    outer_steps = [OuterStep(local, fragment) for fragment in local.fragments]
    before, after = (variant.send, None) if delay else (None, variant.send)

    def value_fn(_):
        problem = "this optimizer asks for the loss at other parameters, as line searches do, which replicas that train apart cannot."
        raise ValueError(format_error(config.strategy, problem, fix="use an optimizer without value_fn."))

    def update(params, opt_state, found):
        return apply_update(config, layout, params, opt_state, found, value_fn)

    def send(number, shared, own, replicas):
        wire = replicas.reducer[number] if replicas.reducer else None
        before = wire.now if isinstance(wire, Delayed) else wire
        delta, wire = outer_steps[number].send(shared, own, before)
        if replicas.reducer:
            wire = Delayed(wire, before) if delay else wire
            replicas = replicas._replace(reducer=_replaced(replicas.reducer, number, wire))
        return delta, replicas

    def arrived(number, replicas):
        """What was sent cannot be taken back any more."""
        wire = replicas.reducer[number] if replicas.reducer else None
        if not isinstance(wire, Delayed):
            return replicas
        return replicas._replace(reducer=_replaced(replicas.reducer, number, Delayed(wire.now, copied(wire.now))))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        replicas: Replicas = state.opt_state
        flatten, unflatten = layout.treedef.flatten_up_to, layout.treedef.unflatten
        shared = flatten(state.params)
        if before is not None:
            delta, replicas = send(before, shared, flatten(replicas.params.value), replicas)
            replicas = replicas._replace(pending=_replaced(replicas.pending, before, delta))
        at = state.params if together else replicas.params.value
        found = gradients(at, batch, state.step, state.rng, replicas.inner_reducer)
        if together:
            found = found._replace(metrics=values(found.metrics))  # of all replicas already
            found = jax.tree.map(lambda x: jnp.broadcast_to(x, (local.replicas, *x.shape)), found)
        wire, found = found.reducer, found._replace(reducer=None)
        run = jax.vmap(update, spmd_axis_name=REPLICA)
        params, optimizer = run(replicas.params.value, replicas.optimizer.value, found)
        own = flatten(all_gather_params(config, layout, params))
        if variant.warm:
            shared = take_own(config, layout, own)
        if variant.apply is not None:
            if after is not None:
                delta, replicas = send(after, shared, own, replicas)
            else:
                delta = replicas.pending[variant.apply]
            shared, own, outer = outer_steps[variant.apply].apply(shared, own, delta, replicas.outer[variant.apply])
            replicas = arrived(variant.apply, replicas._replace(outer=_replaced(replicas.outer, variant.apply, outer)))
        if variant.send is not None:
            shared, own = average_updated(config, layout, shared, own, found.updates)
        replicas = replicas._replace(
            params=PerReplica(unflatten(own)), optimizer=PerReplica(optimizer), inner_reducer=wire
        )
        metrics = {"loss": found.loss, "grad_norm": gradient_norm(config, layout, found.grads), **found.metrics}
        return TrainState(state.step + 1, unflatten(shared), replicas, state.rng), metrics

    on_entry, on_exit = shardings(config.mesh, specs), config.home.shardings((specs, PartitionSpec(REPLICA)))
    # keep_unused: what a step overwrites unread, such as what was on its way, gives its memory as well.
    return make_program(config, step, (on_entry, None), on_exit, donated=donated, keep_unused=True)


def make_average(local: LocalLayout, specs: TrainState) -> Callable[[TrainState], TrainState]:
    """Return `state -> state`, jitted within, that makes all parameters the mean of the replicas'.

    What was on its way is dropped: the mean has it all, and to apply it later would count it twice. So the reducer goes
    back to before that was sent: what it left of it is in the mean as well, and what it had left of earlier sends,
    which is in no replica's parameters, it sends later as ever. Nothing is donated, and what does not change is handed
    on as it is, so that no copy of the optimizer's state is made.
    """
    where: Replicas = specs.opt_state
    config, layout = local.config, local.layout

    def run(own: PerReplica, pending: PyTree, before: PyTree) -> tuple[PyTree, PerReplica, PyTree, PyTree]:
        shared, stacked = average(config, layout.plans, layout.treedef.flatten_up_to(own.value))
        unflatten = layout.treedef.unflatten
        nothing = jax.tree.map(jnp.zeros_like, pending)
        return unflatten(shared), PerReplica(unflatten(stacked)), nothing, copied(before)

    on_entry = shardings(config.mesh, (where.params, where.pending, _before(where)))
    on_exit = config.home.shardings((specs.params, where.params, where.pending, _before(where)))
    mean = make_program(config, run, on_entry, on_exit)

    def synchronize(state: TrainState) -> TrainState:
        replicas: Replicas = state.opt_state
        before = _before(replicas)
        shared, own, pending, now = mean(replicas.params, replicas.pending, before)
        if before:
            replicas = replicas._replace(reducer=tuple(Delayed(*both) for both in zip(now, before, strict=True)))
        return state._replace(params=shared, opt_state=replicas._replace(params=own, pending=pending))

    return synchronize


def _before(replicas: Replicas) -> list[PyTree]:
    """Return what the reducers would go back to; nothing without a delay."""
    return [wire.before for wire in replicas.reducer or () if isinstance(wire, Delayed)]


def _replaced(items: tuple[PyTree, ...], at: int, new: PyTree) -> tuple[PyTree, ...]:
    return (*items[:at], new, *items[at + 1 :])


def _of_replicas_here(metric: PyTree) -> jax.Array:
    """Return the mean, or what the metric asks for, over this process's replicas: others would have to be waited for."""
    if isinstance(metric, jax.Array):
        return _over_here(metric, jnp.mean)
    if not isinstance(metric, Sum | Max | Min):
        return metric
    add, largest, smallest = (functools.partial(_over_here, over=over) for over in (jnp.sum, jnp.max, jnp.min))
    return value_of(combined(metric, add, largest, smallest))


def _over_here(values: jax.Array, over: Callable[..., jax.Array]) -> jax.Array:
    shards = {shard.index[0].start or 0: shard.data for shard in values.addressable_shards}
    first = next(iter(shards.values()))
    if len(shards) == 1:
        return first[0]
    device = next(iter(first.devices()))
    with jax.set_mesh(None):  # of the user's program, which would want it on all devices
        return over(jnp.concatenate([jax.device_put(data, device) for data in shards.values()]), axis=0)
