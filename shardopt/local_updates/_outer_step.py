"""The synchronization of a fragment: replicas average their progress, step the outer optimizer, and
mix in the result.
"""

from collections.abc import Collection, Sequence

import jax
import optax
from jax.sharding import PartitionSpec

from shardopt.collectives import all_reduce, per_device
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._transformation import check_updates
from shardopt.core import Arrays, PyTree, is_inexact, widened
from shardopt.local_updates._state import (
    REPLICA,
    Fragment,
    LocalLayout,
    fragment_plans,
    replace_fragment,
    take_fragment,
)
from shardopt.partition import LeafPlan
from shardopt.step._compressed import compress_mean, manual_specs


class OuterStep:
    """Pure functions that synchronize one fragment, on global arrays.

    Their arguments are lists of leaves over the whole parameter tree:

    - `shared_leaves`: the shared parameters, as the strategy places parameters;
    - `replica_leaves`: the parameters of all replicas, stacked [replicas, ...].
    """

    def __init__(self, local_layout: LocalLayout, fragment: Fragment):
        self.caller = local_layout.config.strategy
        self.mesh = local_layout.config.mesh
        self.sync = local_layout.sync
        self.replicas = local_layout.replicas
        self.fragment = fragment
        self.compression = (
            local_layout.compressions[fragment.number] if local_layout.compressions else None
        )
        self.plans = [local_layout.layout.plans[i] for i in fragment.leaves]
        sharded = local_layout.config.placement.params
        self.part_plans = fragment_plans(local_layout, fragment)
        self.specs, self.replica_specs = _specs(local_layout.config, local_layout.layout.plans)
        self.part_specs = [plan.data_spec(sharded=sharded) for plan in self.part_plans]
        self.part_shardings = shardings(
            self.mesh, [plan.spec(sharded=sharded) for plan in self.part_plans]
        )

    def send(
        self, shared_leaves: Arrays, replica_leaves: Arrays, reducer_state: PyTree
    ) -> tuple[Arrays, PyTree]:
        """Return the outer gradient, which is the mean over replicas of shared - replica, and the
        new reducer state.
        """

        def on_device(shared_leaves, replica_leaves, reducer_state):
            deltas = []
            for i, plan in zip(self.fragment.leaves, self.plans, strict=True):
                shared_part, replica_part = (
                    take_fragment(self.fragment, plan, x)
                    for x in (
                        shared_leaves[i],
                        replica_leaves[i].reshape(replica_leaves[i].shape[1:]),
                    )
                )
                # The sign of a gradient: an outer SGD with rate 1 then steps from the shared copy
                # to the mean.
                deltas.append(shared_part - replica_part)
            if self.compression is not None:
                return compress_mean(self.compression, deltas, reducer_state)
            # In bf16 each addition over replicas would round the sum.
            wide_deltas = [widened(delta) for delta in deltas]
            sums = all_reduce(wide_deltas, [REPLICA], [plan.tensor for plan in self.part_plans])
            return [
                (x / self.replicas).astype(delta.dtype)
                for x, delta in zip(sums, deltas, strict=True)
            ], reducer_state

        reducer_specs = None if self.compression is None else manual_specs(self.compression)
        in_specs = (self.specs, self.replica_specs, reducer_specs)
        run = per_device(
            on_device, self.mesh, in_specs=in_specs, out_specs=(self.part_specs, reducer_specs)
        )
        return run(shared_leaves, replica_leaves, reducer_state)

    def apply(
        self, shared_leaves: Arrays, replica_leaves: Arrays, delta: Arrays, outer_state: PyTree
    ) -> tuple[Arrays, Arrays, PyTree]:
        """Return the shared leaves, the replica leaves and the outer state after an outer update of
        this fragment.
        """

        def place(leaves):
            return jax.lax.with_sharding_constraint(leaves, self.part_shardings)

        old_parts = place(self.take_fragment(shared_leaves))
        updates, outer_state = self.sync.outer.update(place(delta), outer_state, old_parts)
        check_updates(self.caller, old_parts, updates)
        new_parts = place(optax.apply_updates(old_parts, updates))
        mix = self.sync.mix

        def on_device(shared_leaves, replica_leaves, new_parts):
            shared_leaves = list(shared_leaves)
            replica_leaves = list(replica_leaves)
            for i, plan, shared_part in zip(
                self.fragment.leaves, self.plans, new_parts, strict=True
            ):
                shared_leaves[i] = replace_fragment(
                    self.fragment, plan, shared_leaves[i], shared_part
                )
                replica_leaf = replica_leaves[i].reshape(replica_leaves[i].shape[1:])
                replica_part = shared_part
                # Streaming DiLoCo: a replica keeps a part of its own steps, some of which the mean
                # has not seen.
                if mix:
                    replica_part = (
                        (1 - mix) * shared_part
                        + mix * take_fragment(self.fragment, plan, replica_leaf)
                    ).astype(shared_part.dtype)
                replica_leaves[i] = replace_fragment(
                    self.fragment, plan, replica_leaf, replica_part
                )[None]
            return shared_leaves, replica_leaves

        specs = (self.specs, self.replica_specs)
        run = per_device(on_device, self.mesh, in_specs=(*specs, self.part_specs), out_specs=specs)
        return *run(shared_leaves, replica_leaves, new_parts), outer_state

    def take_fragment(self, shared_leaves: Arrays) -> Arrays:
        """Return the parts of the shared parameters that are in the fragment."""

        def on_device(shared_leaves):
            return [
                take_fragment(self.fragment, plan, shared_leaves[i])
                for i, plan in zip(self.fragment.leaves, self.plans, strict=True)
            ]

        return per_device(on_device, self.mesh, in_specs=(self.specs,), out_specs=self.part_specs)(
            shared_leaves
        )


def average(
    config: StrategyConfig, plans: Sequence[LeafPlan], replica_leaves: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the mean over replicas, both as shared leaves and as replica leaves.

    Integer leaves take the maximum.
    """
    specs, replica_specs = _specs(config, plans)
    replicas = config.mesh.shape[REPLICA]

    def average_leaf(plan, leaf):
        if not is_inexact(leaf):
            return jax.lax.pmax(leaf, REPLICA)
        (total,) = all_reduce([widened(leaf)], [REPLICA], [plan.tensor])
        return (total / replicas).astype(leaf.dtype)

    def on_device(replica_leaves):
        means = [
            average_leaf(plan, x.reshape(x.shape[1:]))
            for plan, x in zip(plans, replica_leaves, strict=True)
        ]
        return means, [x[None] for x in means]

    return per_device(
        on_device, config.mesh, in_specs=(replica_specs,), out_specs=(specs, replica_specs)
    )(replica_leaves)


def average_updated(
    config: StrategyConfig,
    layout: Layout,
    shared_leaves: Arrays,
    replica_leaves: Arrays,
    paths: Collection[str],
) -> tuple[Arrays, Arrays]:
    """Average the frozen leaves that the loss itself updates (`so.losses.Updated`) over replicas.

    Return all leaves.
    """
    indices = [i for i, plan in enumerate(layout.plans) if plan.path in paths]
    if not indices:
        return shared_leaves, replica_leaves
    means, stacked_means = average(
        config, [layout.plans[i] for i in indices], [replica_leaves[i] for i in indices]
    )
    shared_leaves = list(shared_leaves)
    replica_leaves = list(replica_leaves)
    for i, mean, stacked_mean in zip(indices, means, stacked_means, strict=True):
        shared_leaves[i], replica_leaves[i] = mean, stacked_mean
    return shared_leaves, replica_leaves


def unstack_equal_replicas(
    config: StrategyConfig, layout: Layout, replica_leaves: Arrays
) -> Arrays:
    """Return replica leaves as shared leaves, without communication; all replicas must be equal."""
    specs, replica_specs = _specs(config, layout.plans)

    def on_device(replica_leaves):
        return [x.reshape(x.shape[1:]) for x in replica_leaves]

    run = per_device(on_device, config.mesh, in_specs=(replica_specs,), out_specs=specs)
    return run(replica_leaves)


def _specs(
    config: StrategyConfig, plans: Sequence[LeafPlan]
) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """Return how parameters are sharded over data: shared ones, and the parameters of stacked
    replicas.
    """
    specs = [plan.data_spec(sharded=config.placement.params) for plan in plans]
    return specs, [config.axes.stack(spec) for spec in specs]
