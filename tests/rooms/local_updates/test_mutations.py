"""The comparison with the reference can fail: each way of breaking an agreement on purpose is
noticed.
"""

import jax
import optax
import pytest
from support import diloco as reference
from support.seams import break_function

import shardopt as so
from shardopt.local_updates import _outer_step as outer_step
from shardopt.local_updates import _step as step

TX = optax.sgd(0.05, momentum=0.9)
HOW = {"sync_every": 4, "fragments": 2, "delay": 1, "mix": 0.25}


def keep_to_oneself(patch):
    break_function(patch, outer_step.all_reduce, lambda leaves, *_: leaves)


def sum_for_mean(patch):
    once = outer_step.all_reduce
    break_function(
        patch,
        outer_step.all_reduce,
        lambda leaves, *arguments: [2 * x for x in once(leaves, *arguments)],
    )


def take_other_blocks(patch):
    break_function(
        patch,
        outer_step.replace_fragment,
        lambda fragment, plan, leaf, part: (
            leaf.at[: part.shape[0]].set(part) if plan.stacked else part
        ),
    )


def one_step_late(patch):
    variant_of = step.variant_of
    break_function(patch, step.variant_of, lambda sync, now: variant_of(sync, now - 1))


def forget_what_was_learned(patch):
    make_step = step.make_step

    def make(local, placed, variant, donated):
        outer = local.sync.outer
        fresh = local.sync._replace(
            outer=outer._replace(update=lambda g, s, p: (outer.update(g, s, p)[0], s))
        )
        return make_step(
            local._replace(config=local.config._replace(local_updates=fresh)),
            placed,
            variant,
            donated,
        )

    break_function(patch, step.make_step, make)


MUTATIONS = [
    keep_to_oneself,
    sum_for_mean,
    take_other_blocks,
    one_step_late,
    forget_what_was_learned,
]


@pytest.fixture
def difference(strategy_of, tiny, new_batches, steps_on, rows_of, max_difference):
    def run():
        model, make = tiny
        params = make()
        batches = new_batches(8)
        opt = so.diloco(strategy_of("fsdp", TX, model=model), **HOW)
        state, _ = steps_on(opt, opt.init(params), batches)
        shared, replica_params = reference.diloco(TX, model.loss_fn, params, batches, 2, **HOW)
        return max(
            max_difference(jax.device_get(state.params), shared),
            max_difference(rows_of(state), replica_params),
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_agreement_is_noticed(mutate, difference, monkeypatch, x64):
    mutate(monkeypatch)
    assert difference() > 1e-6


@pytest.mark.slow
def test_an_unbroken_one_is_not(difference, x64):
    assert difference() < 1e-10
