"""One program for every schedule: a scan over the rows of its table, each tick doing what the row says."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.collectives import constrain_tensor
from shardopt.core.types import PyTree
from shardopt.pipeline import messages
from shardopt.pipeline.cut import Counts
from shardopt.pipeline.messages import PIPELINE, Index, add, make_buffers, make_filled, read_slot, write_slot
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.stage import (
    Carry,
    Place,
    Setup,
    StageFns,
    Sums,
    chunk_backward,
    chunk_backward_deferring,
    chunk_forward,
    chunk_forward_keeping,
    chunk_weight,
    first_carry,
    make_stage,
    prepare,
)
from shardopt.remat.split_backward import Arrays

Row = dict[str, jax.Array]
"""A row of the schedule's table, for this stage."""


_Forwards = tuple[Arrays, list[Arrays], Arrays, PyTree]
"""What goes from tick to tick of forwards alone: what waits, what has arrived, what is still to be sent, the losses."""


def execute(
    schedule: Schedule,
    fns: StageFns,
    weights: Arrays,
    counts: Counts,
    *,
    remat: bool,
    block_specs: Sequence[PartitionSpec],
    outer_specs: Sequence[PartitionSpec],
    idle: float = 0.0,
) -> Sums:
    """Differentiate every micro-batch as the schedule says; call it in the per-device view.

    On each tick a stage stores the messages that arrived, runs the passes that its row names, and sends what they made;
    or, where messages are sent ahead, what those of the tick before made, beside the passes.
    A pass without work is skipped by a branch; the permutes stand outside of branches, since every stage takes part.

    Args:
      schedule: the table.
      fns: the model.
      weights: this stage's blocks, stacked [chunks * k, ...] in the order of `schedule.virtual_stages`, k the largest count.
      counts: [V], how many blocks each virtual stage runs, in the order of the model.
      remat: keep the input of each chunk, and run its forward again in the backward pass, rather than what that needs.
      block_specs: how the gradient of each trained weight, stacked, lies over tensor.
      outer_specs: the same of the outer weights.
      idle: what an idle pass hands on and ring buffers begin with; NaN shows that nobody reads it.
    """
    setup = prepare(schedule, fns, weights, counts, remat=remat, idle=idle)
    ahead = schedule.ticks.message_ticks > 1

    def one(carry: Carry, row: Row) -> tuple[Carry, None]:
        carry = carry._replace(
            inputs=messages.store_message(carry.inputs, carry.arrived, row["forward_arrival"]),
            cotangents=messages.store_message(carry.cotangents, carry.returned, row["backward_arrival"]),
        )
        y, carry = tick_forward(setup, carry, row)
        dx, carry = tick_backward(setup, carry, row, y)
        carry = tick_weight(setup, carry, row)
        # Left alone, the partitioner would replicate the sums over tensor.
        sums = carry.sums._replace(
            blocks=constrain_tensor(carry.sums.blocks, block_specs),
            outer=constrain_tensor(carry.sums.outer, outer_specs),
        )
        return carry._replace(
            arrived=messages.send(schedule, "forward", y, carry.leaving),
            returned=messages.send(schedule, "backward", dx, carry.leaving_back),
            leaving=y if ahead else [],
            leaving_back=dx if ahead else [],
            sums=sums,
        ), None

    carry, _ = jax.lax.scan(one, first_carry(setup), _table(schedule))
    return carry.sums


def forward_only(schedule: Schedule, fns: StageFns, weights: Arrays, counts: Counts) -> PyTree:
    """Run the forward passes alone, on their ticks; what `loss` returned, [M, ...], zeros but on the last stage.

    It can be differentiated, at the price of keeping one input per tick and running each forward again.
    """
    stage, ahead = make_stage(schedule, fns, weights, counts), schedule.ticks.message_ticks > 1
    shapes = jax.eval_shape(fns.loss, jnp.int32(0), stage.x)
    totals = jax.tree.map(lambda x: jnp.zeros((schedule.num_micro_batches, *x.shape), x.dtype), shapes)

    @jax.checkpoint
    def one(carry: _Forwards, row: Row) -> tuple[_Forwards, None]:
        inputs, arrived, leaving, totals = carry
        inputs = messages.store_message(inputs, arrived, row["forward_arrival"])
        m = row["forward_micro_batch"]

        def work(totals):
            x = messages.read_message(
                row["forward_source"], lambda: fns.embed(m), arrived, inputs, row["forward_waited"]
            )
            y = chunk_forward(stage.chunk(row["forward_chunk"], m), fns.block, x, differentiable=True)
            return y, jax.lax.cond(
                row["forward_is_last"], lambda: write_slot(totals, m, fns.loss(m, y)), lambda: totals
            )

        y, totals = jax.lax.cond(m >= 0, work, lambda totals: (make_filled(stage.x, 0.0), totals), totals)
        return (inputs, messages.send(schedule, "forward", y, leaving), y if ahead else [], totals), None

    inputs = make_buffers(stage.x, schedule.num_input_slots, 0.0)
    arrived = [make_filled(stage.x, 0.0) for _ in schedule.forward_shifts]
    num_ticks = 1 + int(schedule.ticks.passes["forward"].max())
    rows = {name: column[:num_ticks] for name, column in _table(schedule).items() if name.startswith("forward")}
    leaving = make_filled(stage.x, 0.0) if ahead else []
    return jax.lax.scan(one, (inputs, arrived, leaving, totals), rows)[0][3]


def tick_forward(setup: Setup, carry: Carry, row: Row) -> tuple[Arrays, Carry]:
    """Run the forward pass of this tick; return its output, for the next stage."""
    fns = setup.stage.fns

    def work(activations, outputs):
        m, slot = row["forward_micro_batch"], row["forward_slot"]
        x = messages.read_message(
            row["forward_source"], lambda: fns.embed(m), carry.arrived, carry.inputs, row["forward_waited"]
        )
        chunk = setup.stage.chunk(row["forward_chunk"], m)
        if setup.remat:
            # The backward pass of the last chunk runs it anyway.
            y = jax.lax.cond(row["forward_is_last"], lambda: x, lambda: chunk_forward(chunk, fns.block, x))
            return y, write_slot(activations, slot, x), outputs
        y, activations = chunk_forward_keeping(chunk, setup.passes, x, _place(activations, slot))
        if outputs:
            outputs = jax.lax.cond(row["forward_is_last"], write_slot, lambda outputs, *_: outputs, outputs, slot, y)
        return y, activations, outputs

    def idle(activations, outputs):
        return make_filled(setup.stage.x, setup.idle), activations, outputs

    busy = row["forward_micro_batch"] >= 0
    y, activations, outputs = jax.lax.cond(busy, work, idle, carry.activations, carry.outputs)
    return y, carry._replace(activations=activations, outputs=outputs)


def tick_backward(setup: Setup, carry: Carry, row: Row, y: Arrays) -> tuple[Arrays, Carry]:
    """Run the backward pass of this tick; return the gradient of its input, for the stage before."""
    fns, splits = setup.stage.fns, setup.stage.schedule.ticks.weight is not None

    def work(deferred, sums):
        m, slot = row["backward_micro_batch"], row["backward_slot"]
        chunk = setup.stage.chunk(row["backward_chunk"], m)
        if setup.remat:
            residuals = _place_again(setup, deferred, row)
            x = read_slot(carry.activations, slot)
            last, buffers = chunk_forward_keeping(chunk, setup.passes, x, residuals)
            residuals = residuals._replace(buffers=buffers)
        else:
            residuals = _place(carry.activations, slot)
            last = read_slot(carry.outputs, slot) if carry.outputs else y

        def at_loss(sums):
            dy, grads, totals = fns.loss_grads(m, last)
            stacked = write_slot(sums.parts, m, totals)
            return dy, sums._replace(outer=add(sums.outer, grads), parts=stacked)

        def from_next(sums):
            return messages.read_message(
                row["backward_source"], None, carry.returned, carry.cotangents, row["backward_waited"]
            ), sums

        if carry.returned or carry.cotangents:
            dy, sums = jax.lax.cond(row["backward_is_last"], at_loss, from_next, sums)
        else:
            dy, sums = at_loss(sums)
        if splits:
            left = _place(deferred[: len(setup.passes.deferred)], row["backward_deferred"])
            dx, made = chunk_backward_deferring(chunk, setup.passes, residuals, dy, left)
            deferred = [*made, *(residuals.buffers[i] for i in setup.residuals_for_weight)]
        else:
            dx, blocks = chunk_backward(chunk, setup.passes, residuals, dy, sums.blocks, fns.reduce)
            sums = sums._replace(blocks=blocks)
        outer = jax.lax.cond(
            row["backward_is_first"],
            lambda outer: add(outer, fns.embed_grads(m, dx)),
            lambda outer: outer,
            sums.outer,
        )
        return dx, deferred, sums._replace(outer=outer)

    def idle(deferred, sums):
        return make_filled(setup.dx, setup.idle), deferred, sums

    busy = row["backward_micro_batch"] >= 0
    dx, deferred, sums = jax.lax.cond(busy, work, idle, carry.deferred, carry.sums)
    return dx, carry._replace(deferred=deferred, sums=sums)


def tick_weight(setup: Setup, carry: Carry, row: Row) -> Carry:
    """Run the weight pass of this tick, where the schedule splits it off."""
    if setup.stage.schedule.ticks.weight is None:
        return carry

    def work(blocks):
        chunk = setup.stage.chunk(row["weight_chunk"], row["weight_micro_batch"])
        num, slot = len(setup.passes.deferred), row["weight_deferred"]
        left = _place(carry.deferred[:num], slot)
        if setup.remat:
            residuals = _place(carry.deferred[num:], slot)
        else:
            residuals = _place([carry.activations[i] for i in setup.passes.weight_residuals], row["weight_slot"])
        return chunk_weight(chunk, setup.passes, residuals, left, blocks, setup.stage.fns.reduce)

    busy = row["weight_micro_batch"] >= 0
    blocks = jax.lax.cond(busy, work, lambda blocks: blocks, carry.sums.blocks)
    return carry._replace(sums=carry.sums._replace(blocks=blocks))


def _place(buffers: Arrays, slot: jax.Array) -> Place:
    return Place(buffers, [slot] * len(buffers))


def _place_again(setup: Setup, deferred: Arrays, row: Row) -> Place:
    """Return where a forward run again stores residuals: those that the weight pass reads in `deferred`."""
    buffers = make_buffers(setup.passes.residuals, setup.stage.num_blocks, 0.0)  # the others, for this tick
    slots: list[Index] = [0] * len(buffers)
    for at, i in enumerate(setup.residuals_for_weight, len(setup.passes.deferred)):
        buffers[i], slots[i] = deferred[at], row["backward_deferred"]
    return Place(buffers, slots)


def _table(schedule: Schedule) -> Row:
    """Return this stage's columns of the table, [num_ticks, ...], with the source that each pass reads."""
    table = schedule.table()
    stage_of, virtual = schedule.ticks.stage_of, np.asarray(schedule.virtual_stages)
    for kind, shifts in (("forward", schedule.forward_shifts), ("backward", schedule.backward_shifts)):
        table[f"{kind}_source"] = messages.message_sources(table, kind, len(shifts))
        stage = np.arange(schedule.num_stages)
        at = np.where(table[f"{kind}_micro_batch"] >= 0, virtual[stage, table[f"{kind}_chunk"]], -1)
        table[f"{kind}_is_first"] = at == 0
        table[f"{kind}_is_last"] = at == len(stage_of) - 1
    stage = jax.lax.axis_index(PIPELINE)
    return {name: jnp.asarray(column)[:, stage] for name, column in table.items()}
