"""The contract can fail: each way of breaking a strategy on purpose is noticed by comparing with
one device.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.problems import problem
from support.reference import relative_difference, train
from support.seams import break_function
from support.table import STRATEGIES

from shardopt.collectives import _buckets as together
from shardopt.collectives import _shards as shards
from shardopt.config import _axes as axes
from shardopt.config import _config as config
from shardopt.core._types import Weighted
from shardopt.losses import _loss as loss
from shardopt.losses import _sums as sums
from shardopt.step import _build as build
from shardopt.step import _gradients as gradients
from shardopt.step import _inputs as inputs
from shardopt.step import _step as step

pytestmark = pytest.mark.slow  # the contract is broken on purpose


def drop_the_reduction(patch):
    break_function(patch, sums.all_reduce_grads, lambda grads, *args, **kwargs: grads)


def reduce_twice(patch):
    once = sums.all_reduce_grads
    break_function(
        patch,
        sums.all_reduce_grads,
        lambda grads, *args, **kwargs: once(once(grads, *args, **kwargs), *args, **kwargs),
    )


def sum_for_mean(patch):
    sum_parts = sums.sum_parts

    def unweighted(parts, axes, **kwargs):
        summed = sum_parts(parts, axes, **kwargs)
        return summed._replace(loss=Weighted(summed.loss.total, jnp.ones_like(summed.loss.weight)))

    break_function(patch, sums.sum_parts, unweighted)


def mean_of_means(patch):
    parts_of = loss.loss_parts

    def normalised(caller, returned, rows):
        parts = parts_of(caller, returned, rows)
        mean = parts.loss.total / parts.loss.weight
        return parts._replace(loss=Weighted(mean, jnp.ones_like(parts.loss.weight)))

    break_function(patch, loss.loss_parts, normalised)


def swap_two_axes(patch):
    right = axes.axes_of
    break_function(
        patch, config.axes_of, lambda *args, **kw: right(*args, **kw)._replace(summed=("replica",))
    )


def forget_a_micro_batch(patch):
    accumulate = gradients.accumulate
    break_function(
        patch,
        gradients.accumulate,
        lambda run_micro_batch, batch, count, *how: accumulate(
            run_micro_batch, jax.tree.map(lambda x: x[: x.shape[0] // 2], batch), 1, *how
        ),
    )


def scatter_in_the_wrong_order(patch):
    move = shards._apply_where_sharded

    def rolled(collective, leaves, wires):
        pairs = zip(move(collective, leaves, wires), wires, strict=True)
        return [x if wire.dim is None else jnp.roll(x, 1, axis=wire.dim) for x, wire in pairs]

    break_function(patch, shards._apply_where_sharded, rolled)


def cut_what_travelled_together_in_the_wrong_order(patch):
    rolled = together.shards_of
    break_function(patch, together.shards_of, lambda x, dim, n: rolled(x, dim, n)[::-1])


def apply_the_update_twice(patch):
    apply = step.apply_update

    def twice(config, layout, params, opt_state, grads, value_fn):
        params = apply(config, layout, params, opt_state, grads, value_fn).params
        return apply(config, layout, params, opt_state, grads, value_fn)

    break_function(patch, step.apply_update, twice)


def every_device_sees_the_first_rows(patch):
    place = inputs.place_batch

    def first_rows(config, rows):
        return place(
            config, jax.tree.map(lambda x: jnp.concatenate([x[:8]] * (x.shape[0] // 8)), rows)
        )

    break_function(patch, build.place_batch, first_rows)


MUTATIONS = {
    drop_the_reduction: ["ddp"],
    reduce_twice: ["ddp"],
    sum_for_mean: ["ddp", "fsdp"],
    mean_of_means: ["zero1", "zero2"],
    swap_two_axes: ["zero1", "fsdp"],
    forget_a_micro_batch: ["zero2"],
    scatter_in_the_wrong_order: ["zero1", "fsdp"],
    cut_what_travelled_together_in_the_wrong_order: ["zero1", "zero2"],
    apply_the_update_twice: ["zero1"],
    every_device_sees_the_first_rows: ["ddp"],
}
CASES = [(mutate, strategy) for mutate, strategies in MUTATIONS.items() for strategy in strategies]


def difference(strategy, mesh):
    case = problem("odd", weighted=True, steps=3)
    tx = optax.sgd(0.05, momentum=0.9)
    opt = STRATEGIES[strategy](tx, mesh, case.loss_fn, micro_batches=2)
    state = opt.init(case.params)
    for rows in case.batches:
        state, _ = opt.step(state, rows)
    return relative_difference(
        state.params, train(tx, case.reference, case.params, case.batches)[1]
    )


@pytest.mark.parametrize(("mutate", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_contract_notices_each_mutation(mutate, strategy, mesh_of, x64):
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        # NaN is noticed as well
        assert not difference(strategy, mesh_of(replica=2, data=4)) <= 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_mutation_nothing_differs(strategy, mesh_of, x64):
    assert difference(strategy, mesh_of(replica=2, data=4)) <= 1e-10
