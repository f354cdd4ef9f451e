"""How replicas agree on a fragment: the mean of what they did, an outer update, and a mix of it with their own."""

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import optax

from shardopt.collectives import all_reduce, per_device
from shardopt.core.types import PyTree, wide_dtype
from shardopt.engine.compression import compress_mean, manual_specs
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout, shardings
from shardopt.local_updates.state import REPLICA, Fragment, LocalLayout, fragment_plans, put, take
from shardopt.partition import LeafPlan

Leaves = list[jax.Array]


class OuterStep:
    """The pure functions by which replicas agree on one fragment, in the global view.

    Leaves are lists over the whole parameter tree: `shared` as parameters are placed, `own` stacked, one a replica.
    """

    def __init__(self, local: LocalLayout, fragment: Fragment):
        self.mesh, self.sync, self.replicas, self.fragment = local.config.mesh, local.sync, local.replicas, fragment
        self.compression = local.compressions[fragment.number] if local.compressions else None
        self.plans = [local.layout.plans[i] for i in fragment.leaves]
        sharded = local.config.placement.params
        self.parts = fragment_plans(local, fragment)
        self.specs = [plan.data_spec(sharded=sharded) for plan in local.layout.plans]
        self.own_specs = [local.config.axes.stack(spec) for spec in self.specs]
        self.part_specs = [plan.data_spec(sharded=sharded) for plan in self.parts]
        self.placed = shardings(self.mesh, [plan.spec(sharded=sharded) for plan in self.parts])

    def send(self, shared: Leaves, own: Leaves, wire: PyTree) -> tuple[Leaves, PyTree]:
        """Return the mean over replicas of shared - own, the outer gradient, and the state of its reducer."""

        def local(shared, own, wire):
            deltas = []
            for i, plan in zip(self.fragment.leaves, self.plans, strict=True):
                old, new = (take(self.fragment, plan, x) for x in (shared[i], own[i].reshape(own[i].shape[1:])))
                deltas.append(old - new)
            if self.compression is not None:
                return compress_mean(self.compression, deltas, wire)
            wide = [delta.astype(wide_dtype(delta.dtype)) for delta in deltas]
            sums = all_reduce(wide, [REPLICA], [part.tensor for part in self.parts])
            return [(x / self.replicas).astype(delta.dtype) for x, delta in zip(sums, deltas, strict=True)], wire

        specs = None if self.compression is None else manual_specs(self.compression)
        in_specs = (self.specs, self.own_specs, specs)
        run = per_device(local, self.mesh, in_specs=in_specs, out_specs=(self.part_specs, specs))
        return run(shared, own, wire)

    def apply(self, shared: Leaves, own: Leaves, delta: Leaves, outer_state: PyTree) -> tuple[Leaves, Leaves, PyTree]:
        """Return shared and own parameters, and the outer state, after an outer update of this fragment."""
        place = lambda leaves: jax.lax.with_sharding_constraint(leaves, self.placed)  # noqa: E731
        old = place(self.take(shared))
        updates, outer_state = self.sync.outer.update(place(delta), outer_state, old)
        new = place(optax.apply_updates(old, updates))
        mix = self.sync.mix

        def local(shared, own, new):
            shared, own = list(shared), list(own)
            for i, plan, part in zip(self.fragment.leaves, self.plans, new, strict=True):
                shared[i] = put(self.fragment, plan, shared[i], part)
                mine = own[i].reshape(own[i].shape[1:])
                kept = part
                if mix:
                    kept = ((1 - mix) * part + mix * take(self.fragment, plan, mine)).astype(part.dtype)
                own[i] = put(self.fragment, plan, mine, kept)[None]
            return shared, own

        specs = (self.specs, self.own_specs)
        run = per_device(local, self.mesh, in_specs=(*specs, self.part_specs), out_specs=specs)
        return *run(shared, own, new), outer_state

    def take(self, shared: Leaves) -> Leaves:
        """Return the fragment's part of the shared parameters."""

        def local(shared):
            return [
                take(self.fragment, plan, shared[i]) for i, plan in zip(self.fragment.leaves, self.plans, strict=True)
            ]

        return per_device(local, self.mesh, in_specs=(self.specs,), out_specs=self.part_specs)(shared)


def average(config: StrategyConfig, plans: Sequence[LeafPlan], own: Leaves) -> tuple[Leaves, Leaves]:
    """Return leaves shared and own, all of them the mean of the replicas'; integers take the maximum."""
    specs = [plan.data_spec(sharded=config.placement.params) for plan in plans]
    replicas = config.mesh.shape[REPLICA]

    def one(plan, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmax(leaf, REPLICA)
        (total,) = all_reduce([leaf.astype(wide_dtype(leaf.dtype))], [REPLICA], [plan.tensor])
        return (total / replicas).astype(leaf.dtype)

    def local(own):
        means = [one(plan, x.reshape(x.shape[1:])) for plan, x in zip(plans, own, strict=True)]
        return means, [x[None] for x in means]

    own_specs = [config.axes.stack(spec) for spec in specs]
    return per_device(local, config.mesh, in_specs=(own_specs,), out_specs=(specs, own_specs))(own)


def average_updated(
    config: StrategyConfig, layout: Layout, shared: Leaves, own: Leaves, paths: Collection[str]
) -> tuple[Leaves, Leaves]:
    """Make the frozen leaves that the loss itself updates (`so.Updated`) those of all replicas together."""
    chosen = [i for i, plan in enumerate(layout.plans) if plan.path in paths]
    if not chosen:
        return shared, own
    means, own_means = average(config, [layout.plans[i] for i in chosen], [own[i] for i in chosen])
    shared, own = list(shared), list(own)
    for i, mean, one in zip(chosen, means, own_means, strict=True):
        shared[i], own[i] = mean, one
    return shared, own


def take_own(config: StrategyConfig, layout: Layout, own: Leaves) -> Leaves:
    """Return each device's own parameters as the shared ones, where all replicas' are equal."""
    specs = [plan.data_spec(sharded=config.placement.params) for plan in layout.plans]
    run = per_device(
        lambda own: [x.reshape(x.shape[1:]) for x in own],
        config.mesh,
        in_specs=([config.axes.stack(spec) for spec in specs],),
        out_specs=specs,
    )
    return run(own)
