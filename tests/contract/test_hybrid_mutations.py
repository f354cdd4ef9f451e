"""The comparison with one device can fail: each way of breaking a pipeline on purpose is noticed."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.pipelines import SCHEDULES, block_problem
from support.reference import relative_difference, train
from support.seams import break_function

import shardopt as so
from shardopt.core._types import Weighted
from shardopt.losses import _sums as sums
from shardopt.pipeline import _executor as executor
from shardopt.pipeline import _messages as messages
from shardopt.pipeline import _stage as stage
from shardopt.pipeline import _uneven as uneven
from shardopt.step import _gradients as gradients
from shardopt.step import _pipelined as pipelined

pytestmark = pytest.mark.slow  # the contract is broken on purpose


def drop_the_reduction_over_pipeline(patch):
    _drop(patch, "pipeline")


def drop_the_reduction_over_data(patch):
    _drop(patch, "data")


def _drop(patch, axis):
    reduce = gradients.all_reduce_grads

    def without(grads, plans, over):
        return reduce(
            grads,
            plans,
            [tuple(axis_name for axis_name in axes if axis_name != axis) for axes in over],
        )

    break_function(patch, gradients.all_reduce_grads, without)


def swap_the_directions(patch):
    permute = messages.permute

    def turned(leaves, pairs, specs=None):
        return permute(leaves, [(b, a) for a, b in pairs], specs)

    break_function(patch, messages.permute, turned)


def forget_to_reorder_the_blocks(patch):
    break_function(patch, messages.to_schedule, lambda schedule, leaves, specs: list(leaves))


def forget_to_put_gradients_back(patch):
    patch.setattr(pipelined.Pipelined, "stored_order", lambda self, config, layout, grads: grads)


def changed_table(patch, change):
    table_of = executor._table

    def changed(schedule):
        table = table_of(schedule)
        return table | change(table, schedule)

    break_function(patch, executor._table, changed)


def read_the_wrong_activation(patch):
    changed_table(
        patch, lambda table, s: {"backward_slot": (table["backward_slot"] + 1) % s.num_slots}
    )


def read_the_wrong_message(patch):
    changed_table(
        patch,
        lambda table, s: {"forward_waited": (table["forward_waited"] + 1) % s.num_input_slots},
    )


def defer_into_one_slot(patch):
    changed_table(
        patch,
        lambda table, s: {
            name: table[name] * 0 for name in ("backward_deferred", "weight_deferred")
        },
    )


def take_another_micro_batch_for_the_loss(patch):
    def change(table, schedule):
        m = table["backward_micro_batch"]
        return {"backward_micro_batch": jnp.where(m == 1, 0, m)}

    changed_table(patch, change)


def run_the_chunks_in_another_order(patch):
    changed_table(
        patch, lambda table, s: {"forward_chunk": (table["forward_chunk"] + 1) % s.num_chunks}
    )


def lose_arrivals_that_wait(patch):
    break_function(patch, messages.store_message, lambda buffers, arrived, slots: buffers)


def skip_the_weight_pass(patch):
    break_function(patch, executor.tick_weight, lambda run, carry, row: carry)


def skip_a_weight_pass(patch):
    changed_table(
        patch,
        lambda table, s: {
            "weight_micro_batch": jnp.where(
                table["weight_micro_batch"] == 2, -1, table["weight_micro_batch"]
            )
        },
    )


def forget_the_embedding(patch):
    embed_grads = pipelined._PipelinedModel.embed_grads

    def zeros(model, m, dx):
        return jax.tree.map(jnp.zeros_like, embed_grads(model, m, dx))

    patch.setattr(pipelined._PipelinedModel, "embed_grads", zeros)


def sum_for_mean(patch):
    sum_parts = sums.sum_parts

    def unweighted(parts, axes):
        summed = sum_parts(parts, axes)
        return summed._replace(loss=Weighted(summed.loss.total, jnp.ones_like(summed.loss.weight)))

    break_function(patch, sums.sum_parts, unweighted)


def start_from_sums_that_are_not_zero(patch):
    zero_sums = stage._zero_sums

    def ones(prepared):
        zeros = zero_sums(prepared)
        return zeros._replace(blocks=[x + 1e-4 for x in zeros.blocks])

    break_function(patch, stage._zero_sums, ones)


def keep_half_a_message(patch):
    send = messages.send

    def half(schedule, kind, leaves, before):
        halved_leaves = [
            x.at[: x.shape[0] // 2].set(0) if kind == "backward" else x for x in leaves
        ]
        return send(schedule, kind, halved_leaves, before)

    break_function(patch, messages.send, half)


def send_what_was_made_now(patch):
    send = messages.send
    break_function(
        patch,
        messages.send,
        lambda schedule, kind, leaves, before: send(schedule, kind, leaves, leaves),
    )


def run_blocks_that_are_not_there(patch):
    break_function(patch, stage.is_even, lambda counts: True, callers=[stage])


def forget_which_blocks_are_whose(patch):
    rows = uneven.stage_rows
    break_function(
        patch,
        uneven.stage_rows,
        lambda schedule, counts: (rows(schedule, counts)[0][::-1], rows(schedule, counts)[1]),
    )


MUTATIONS = {
    drop_the_reduction_over_pipeline: ["eager_one_f_one_b"],
    drop_the_reduction_over_data: ["eager_one_f_one_b"],
    swap_the_directions: ["eager_one_f_one_b"],
    forget_to_reorder_the_blocks: ["interleaved", "v_shaped"],
    forget_to_put_gradients_back: ["interleaved"],
    read_the_wrong_activation: ["eager_one_f_one_b", "gpipe"],
    read_the_wrong_message: ["v_shaped"],
    defer_into_one_slot: ["zero_bubble"],
    take_another_micro_batch_for_the_loss: ["eager_one_f_one_b"],
    run_the_chunks_in_another_order: ["interleaved"],
    lose_arrivals_that_wait: ["one_f_one_b"],
    skip_the_weight_pass: ["zero_bubble"],
    skip_a_weight_pass: ["zero_bubble_lockstep"],
    forget_the_embedding: ["gpipe"],
    sum_for_mean: ["eager_one_f_one_b"],
    start_from_sums_that_are_not_zero: ["eager_one_f_one_b"],
    keep_half_a_message: ["zero_bubble"],
    send_what_was_made_now: ["zero_bubble_v_ahead"],
    run_blocks_that_are_not_there: ["eager_one_f_one_b, 10 blocks"],
    forget_which_blocks_are_whose: ["eager_one_f_one_b, 10 blocks"],
}
CASES = [(mutate, schedule) for mutate, schedules in MUTATIONS.items() for schedule in schedules]


def difference(schedule, mesh):
    schedule, _, blocks = schedule.partition(", ")
    case = block_problem("pytree", weighted=True, num_blocks=10 if blocks else 8, rows=16, steps=2)
    tx = optax.sgd(0.05, momentum=0.9)
    opt = so.hybrid(
        tx,
        mesh,
        case.loss_fn,
        schedule=SCHEDULES[schedule],
        micro_batches=4,
        placement="zero1",
        min_shard_elements=8,
    )
    state = opt.init(case.params)
    for rows in case.batches:
        state, _ = opt.step(state, rows)
    return relative_difference(
        state.params, train(tx, case.reference, case.params, case.batches)[1]
    )


@pytest.mark.parametrize(("mutate", "schedule"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_contract_notices_each_mutation(mutate, schedule, mesh_of, x64):
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        # NaN is noticed as well
        assert not difference(schedule, mesh_of(data=2, pipeline=4)) <= 1e-6


@pytest.mark.parametrize("schedule", sorted({case_schedule for _, case_schedule in CASES}))
def test_without_a_mutation_nothing_differs(schedule, mesh_of, x64):
    assert difference(schedule, mesh_of(data=2, pipeline=4)) <= 1e-10
