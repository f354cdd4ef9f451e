"""The steps of replicas that train independently: one program for each variant of a step, compiled
at its first use.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._sync import SyncConfig
from shardopt.core import Arrays, Max, Min, PyTree, Sum, TrainState, format_error
from shardopt.core._loss_parts import Gradients, StepMetrics
from shardopt.local_updates._outer_step import (
    OuterStep,
    average,
    average_updated,
    unstack_equal_replicas,
)
from shardopt.local_updates._state import (
    REPLICA,
    Delayed,
    LocalLayout,
    PerReplica,
    ReplicaStates,
    abstract_state,
    first_opt_state,
    make_local_layout,
)
from shardopt.losses._metrics import combined, value_of, values
from shardopt.mesh import without_mesh
from shardopt.step._aliases import DonatedState
from shardopt.step._compile import AotCompiled, make_program
from shardopt.step._inputs import copied
from shardopt.step._opt_state import init_opt_state
from shardopt.step._optimizer import Metrics
from shardopt.step._programs import CompiledStep, compile_evaluate, init_programs
from shardopt.step._step import metrics_of
from shardopt.step._update import all_gather_params, apply_update


def compile_local_step(config: StrategyConfig, layout: Layout) -> CompiledStep:
    """Return the programs of replicas that train independently.

    `layout` is the layout of one replica.
    """
    local_layout = make_local_layout(config, layout)
    abstract, specs = abstract_state(local_layout)

    def init_replicas(params: PyTree) -> ReplicaStates:
        leaves = layout.treedef.flatten_up_to(params)
        parts = [
            OuterStep(local_layout, fragment).take_fragment(leaves)
            for fragment in local_layout.fragments
        ]
        return first_opt_state(local_layout, params, init_opt_state(config, layout, params), parts)

    state_shardings = config.home.shardings(specs)
    return CompiledStep(
        layout=layout,
        abstract=abstract,
        specs=config.home.specs(specs),
        shardings=state_shardings,
        **init_programs(config, layout, state_shardings, init_replicas),
        step=LocalStep(local_layout, specs),
        evaluate=compile_evaluate(config, layout),
        synchronize=make_average(local_layout, specs),
    )


class LocalStep:
    """`(state, batch) -> (state, metrics)`: runs the program of the variant for `state.step`.

    It keeps the number of the last returned step on the host. Reading the number from the device
    would wait for the step.
    """

    def __init__(self, local_layout: LocalLayout, specs: TrainState):
        self.local_layout = local_layout
        self.specs = specs
        self._programs: dict[StepVariant, AotCompiled] = {}
        self._last_step: tuple[jax.Array | None, int] = (None, 0)
        self._donated = DonatedState(
            local_layout.config.mesh
        )  # shared by all variants: each gets states that others returned

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Run a step.

        Metrics are the mean, sum, maximum or minimum over the replicas of this process.
        """
        step = self._step_of(state)
        state, metrics = self._program(step)(state, batch)
        self._last_step = (state.step, step + 1)
        return state, {name: _reduce_local_replicas(value) for name, value in metrics.items()}

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program.

        For an abstract state, of the first step after the warm-up.
        """
        return self._program(self._step_of(state)).lower(state, batch)

    def _program(self, step: int) -> AotCompiled:
        variant = variant_of(self.local_layout.sync, step)
        if variant not in self._programs:
            self._programs[variant] = make_step(
                self.local_layout, self.specs, variant, self._donated
            )
        return self._programs[variant]

    def _step_of(self, state: TrainState) -> int:
        if isinstance(state.step, Tracer):
            problem = "which program a step runs depends on state.step, which is traced here."
            fix = "call step outside jit: it is compiled already."
            raise TypeError(format_error(self.local_layout.config.strategy, problem, fix=fix))
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return self.local_layout.sync.warmup_steps
        last_array, last_step = self._last_step
        if state.step is last_array:
            return last_step
        with jax.transfer_guard("allow"):
            return int(state.step)


class StepVariant(NamedTuple):
    """The actions of a step besides training each replica.

    Attributes:
      warm: whether gradients are averaged over replicas.
      send: the fragment whose outer gradient is sent, or None. With a delay it is sent before the
        step, otherwise after.
      apply: the fragment whose outer update is applied after the step, or None.
    """

    warm: bool = False
    send: int | None = None
    apply: int | None = None


def variant_of(sync: SyncConfig, step: int) -> StepVariant:
    """Return the variant of the step from `step` to `step + 1`.

    Fragment f is due after (f + 1) H / P steps, and then every H steps, counted from the end of the
    warm-up. Its outer gradient is computed from the parameters after that step, and applied `delay`
    steps later. With a delay, sending is part of the next step's program, so that it can overlap
    with training.
    """
    local_steps = step + 1 - sync.warmup_steps
    if local_steps <= 0:
        return StepVariant(warm=True)
    # H = 6, P = 3 fragments, so the stride is 2; local steps 1 to 8, and fragments due after them:
    #
    # step             1   2   3   4   5   6   7   8
    # due              .   0   .   1   .   2   .   0
    # with delay = 1   the outer gradient of a due fragment is sent in the program of the next step,
    #                  which applies it at its end
    stride = sync.stride

    def due_fragment(num_steps):
        step_in_cycle = num_steps % sync.sync_every or sync.sync_every
        return (
            step_in_cycle // stride - 1 if num_steps > 0 and step_in_cycle % stride == 0 else None
        )

    if not sync.delay:
        return StepVariant(send=due_fragment(local_steps), apply=due_fragment(local_steps))
    return StepVariant(
        send=due_fragment(local_steps - 1), apply=due_fragment(local_steps - sync.delay)
    )


def make_step(
    local_layout: LocalLayout,
    specs: TrainState,
    variant: StepVariant,
    donated: DonatedState | None = None,
) -> AotCompiled:
    """Return the jitted `(state, batch) -> (state, metrics)` of a variant.

    Metrics are stacked, one for each replica.
    """
    config = local_layout.config._replace(sync_gradients=variant.warm)
    donated = donated or DonatedState(config.mesh)
    in_shardings = shardings(config.mesh, specs)
    out_shardings = config.home.shardings((specs, PartitionSpec(REPLICA)))
    step = _VariantStep(local_layout, config, variant).step
    # keep_unused also donates the memory of arrays that the step overwrites without reading, such
    # as pending means.
    return make_program(
        config, step, (in_shardings, None), out_shardings, donated=donated, keep_unused=True
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _VariantStep:
    """The step of a variant; its config averages gradients over replicas in the warm-up."""

    local_layout: LocalLayout
    config: StrategyConfig
    variant: StepVariant

    @property
    def sends_first(self) -> bool:
        """Whether a fragment is sent before the step."""
        return self.local_layout.sync.delay > 0

    @property
    def one_global_loss(self) -> bool:
        """Whether one loss of the whole batch is computed: in the warm-up all replicas are equal."""
        return self.variant.warm and self.config.loss.view == "global"

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepMetrics]:
        """Send, train each replica for a step, and apply, as the variant says."""
        config = self.config
        layout = self.local_layout.layout
        variant = self.variant
        replicas: ReplicaStates = state.opt_state
        flatten = layout.treedef.flatten_up_to
        unflatten = layout.treedef.unflatten
        shared_leaves = flatten(state.params)
        if variant.send is not None and self.sends_first:
            delta, replicas = self.send(
                variant.send, shared_leaves, flatten(replicas.params.value), replicas
            )
            replicas = replicas._replace(pending=_replaced(replicas.pending, variant.send, delta))
        results = self.gradients(state, batch, replicas)
        # Out of the results before `vmap` over replicas: this state is stacked in its own way.
        inner_reducer = results.reducer
        results = results._replace(reducer=None)
        params, optimizer = self.update(replicas, results)
        replica_leaves = flatten(all_gather_params(config, layout, params))
        if variant.warm:
            # In the warm-up all replicas took the same update, so any of them is the shared copy.
            shared_leaves = unstack_equal_replicas(config, layout, replica_leaves)
        if variant.apply is not None:
            shared_leaves, replica_leaves, replicas = self.apply(
                variant.apply, shared_leaves, replica_leaves, replicas
            )
        if variant.send is not None:
            shared_leaves, replica_leaves = average_updated(
                config, layout, shared_leaves, replica_leaves, results.updates
            )
        replicas = replicas._replace(
            params=PerReplica(unflatten(replica_leaves)),
            optimizer=PerReplica(optimizer),
            inner_reducer=inner_reducer,
        )
        metrics = metrics_of(config, layout, results)
        return TrainState(state.step + 1, unflatten(shared_leaves), replicas, state.rng), metrics

    def gradients(self, state: TrainState, batch: PyTree, replicas: ReplicaStates) -> Gradients:
        """Return the gradients and metrics of each replica."""
        config = self.config
        layout = self.local_layout.layout
        if self.one_global_loss:
            config = config._replace(local_updates=None)
        gradients = config.differentiate.gradients(config, layout)
        loss_params = state.params if self.one_global_loss else replicas.params.value
        results = gradients(loss_params, batch, state.step, state.rng, replicas.inner_reducer)
        if not self.one_global_loss:
            return results
        # metrics are over all replicas already
        results = results._replace(metrics=values(results.metrics))
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.local_layout.replicas, *x.shape)), results
        )

    def update(self, replicas: ReplicaStates, results: Gradients) -> tuple[PyTree, PyTree]:
        """Return the parameters and the optimizer state of each replica after its update."""
        config = self.config
        layout = self.local_layout.layout

        def value_fn(_):
            problem = (
                "this optimizer asks for the loss at other parameters, as line searches do, which"
                " replicas that train apart cannot."
            )
            raise ValueError(
                format_error(config.strategy, problem, fix="use an optimizer without value_fn.")
            )

        def update_replica(params, opt_state, gradient_results):
            return apply_update(config, layout, params, opt_state, gradient_results, value_fn)[:2]

        # The update of one replica, mapped: its norms and collectives stay inside of the replica.
        # `spmd_axis_name` keeps the stacked dim on the replica axis.
        update_replicas = jax.vmap(update_replica, spmd_axis_name=REPLICA)
        return update_replicas(replicas.params.value, replicas.optimizer.value, results)

    def send(
        self, number: int, shared_leaves: Arrays, replica_leaves: Arrays, replicas: ReplicaStates
    ) -> tuple[Arrays, ReplicaStates]:
        """Return the outer gradient of a fragment, and the replicas with the new state of its
        reducer.
        """
        reducer_state = replicas.reducer[number] if replicas.reducer else None
        old_state = reducer_state.now if isinstance(reducer_state, Delayed) else reducer_state
        delta, reducer_state = self.outer_step(number).send(
            shared_leaves, replica_leaves, old_state
        )
        if replicas.reducer:
            # The old state is kept until the mean is applied, so that `synchronize` can undo the
            # send.
            reducer_state = Delayed(reducer_state, old_state) if self.sends_first else reducer_state
            replicas = replicas._replace(reducer=_replaced(replicas.reducer, number, reducer_state))
        return delta, replicas

    def apply(
        self, number: int, shared_leaves: Arrays, replica_leaves: Arrays, replicas: ReplicaStates
    ) -> tuple[Arrays, Arrays, ReplicaStates]:
        """Apply the outer gradient of a fragment: the pending one, or the one that this step sends."""
        if self.variant.send is not None and not self.sends_first:
            delta, replicas = self.send(self.variant.send, shared_leaves, replica_leaves, replicas)
        else:
            delta = replicas.pending[number]
        shared_leaves, replica_leaves, outer_state = self.outer_step(number).apply(
            shared_leaves, replica_leaves, delta, replicas.outer[number]
        )
        replicas = replicas._replace(outer=_replaced(replicas.outer, number, outer_state))
        if replicas.reducer and isinstance(reducer_state := replicas.reducer[number], Delayed):
            # the mean was applied: the send cannot be undone any more
            confirmed = Delayed(reducer_state.now, copied(reducer_state.now))
            replicas = replicas._replace(reducer=_replaced(replicas.reducer, number, confirmed))
        return shared_leaves, replica_leaves, replicas

    def outer_step(self, number: int) -> OuterStep:
        """Return the functions that synchronize a fragment."""
        return OuterStep(self.local_layout, self.local_layout.fragments[number])


def make_average(
    local_layout: LocalLayout, specs: TrainState
) -> Callable[[TrainState], TrainState]:
    """Return a function `state -> state` that sets all parameters to the mean of the replicas.

    Pending outer gradients are dropped: the mean contains them, and applying them later would count
    them twice. So the reducer returns to its state before they were sent. Its residual of the
    dropped gradients is in the mean too. Its residual of earlier sends is in no replica's
    parameters, and is sent later as usual.

    Nothing is donated, and unchanged leaves are returned without a copy, so the state of the
    optimizer is not copied.
    """
    replica_specs: ReplicaStates = specs.opt_state
    config = local_layout.config
    layout = local_layout.layout

    def run(
        replica_params: PerReplica, pending: PyTree, reducer_states: PyTree
    ) -> tuple[PyTree, PerReplica, PyTree, PyTree]:
        shared_leaves, replica_leaves = average(
            config, layout.plans, layout.treedef.flatten_up_to(replica_params.value)
        )
        unflatten = layout.treedef.unflatten
        # The mean of the replicas holds the progress that was sent; see the docstring.
        no_pending = jax.tree.map(jnp.zeros_like, pending)
        return (
            unflatten(shared_leaves),
            PerReplica(unflatten(replica_leaves)),
            no_pending,
            copied(reducer_states),
        )

    in_shardings = shardings(
        config.mesh,
        (replica_specs.params, replica_specs.pending, _states_before_send(replica_specs)),
    )
    out_shardings = config.home.shardings(
        (
            specs.params,
            replica_specs.params,
            replica_specs.pending,
            _states_before_send(replica_specs),
        )
    )
    average_program = make_program(config, run, in_shardings, out_shardings)

    def synchronize(state: TrainState) -> TrainState:
        replicas: ReplicaStates = state.opt_state
        before = _states_before_send(replicas)
        shared_params, replica_params, pending, now = average_program(
            replicas.params, replicas.pending, before
        )
        if before:
            replicas = replicas._replace(
                reducer=tuple(Delayed(*states) for states in zip(now, before, strict=True))
            )
        return state._replace(
            params=shared_params,
            opt_state=replicas._replace(params=replica_params, pending=pending),
        )

    return synchronize


def _states_before_send(replicas: ReplicaStates) -> list[PyTree]:
    """Return the reducer states before the pending sends; an empty list without a delay."""
    return [
        reducer_state.before
        for reducer_state in replicas.reducer or ()
        if isinstance(reducer_state, Delayed)
    ]


def _replaced(elements: tuple[PyTree, ...], index: int, new_element: PyTree) -> tuple[PyTree, ...]:
    return (*elements[:index], new_element, *elements[index + 1 :])


def _reduce_local_replicas(metric: PyTree) -> jax.Array:
    """Return the mean of a metric over this process's replicas.

    For `Sum`, `Max` and `Min` the sum, maximum or minimum.

    Replicas of other processes are left out, because the step would have to wait for them.
    """
    if isinstance(metric, jax.Array):
        return _reduce_local_shards(metric, jnp.mean)
    if not isinstance(metric, Sum | Max | Min):
        return metric
    add, largest, smallest = (
        functools.partial(_reduce_local_shards, reduce=reduce)
        for reduce in (jnp.sum, jnp.max, jnp.min)
    )
    return value_of(combined(metric, add, largest, smallest))


def _reduce_local_shards(values: jax.Array, reduce: Callable[..., jax.Array]) -> jax.Array:
    # By the number of the replica: several devices of one replica have equal copies, and one
    # counts.
    shards = {shard.index[0].start or 0: shard.data for shard in values.addressable_shards}
    first_shard = next(iter(shards.values()))
    if len(shards) == 1:
        return first_shard[0]
    device = next(iter(first_shard.devices()))
    # the mesh of the user's program would require the result on all devices
    with without_mesh():
        return _reduction(reduce)(jax.device_put([*shards.values()], device))


@functools.lru_cache(maxsize=8)
def _reduction(reduce: Callable[..., jax.Array]) -> jax.stages.Wrapped:
    return jax.jit(lambda shards: reduce(jnp.concatenate(shards), axis=0))
