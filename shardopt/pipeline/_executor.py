"""One program for every schedule: a scan over the rows of the schedule's table.

A row names the passes of one tick.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.collectives import constrain_tensor
from shardopt.core import Arrays, PyTree
from shardopt.partition._counts import Counts
from shardopt.pipeline import _messages as messages
from shardopt.pipeline._messages import (
    PIPELINE,
    Index,
    add,
    make_buffers,
    make_filled,
    read_slot,
    write_slot,
)
from shardopt.pipeline._schedule import Schedule
from shardopt.pipeline._stage import (
    BufferSlots,
    Carry,
    Setup,
    StageFns,
    Sums,
    chunk_backward,
    chunk_backward_deferring,
    chunk_forward,
    chunk_forward_keeping,
    chunk_weight,
    initial_carry,
    make_setup,
    make_stage,
)

Row = dict[str, jax.Array]
"""A row of the schedule's table, for this stage."""


_ForwardCarry = tuple[Arrays, list[Arrays], Arrays, PyTree]
"""The carry of `forward_only`: waiting inputs, arrived messages, outgoing messages, losses so far.
"""


class SumSpecs(NamedTuple):
    """How the gradients in `Sums` are sharded over tensor.

    Attributes:
      blocks: the spec of the stacked gradient of each trained weight.
      outer: the spec of the gradient of each outer weight.
    """

    blocks: Sequence[PartitionSpec]
    outer: Sequence[PartitionSpec]


def execute(
    schedule: Schedule,
    fns: StageFns,
    weights: Arrays,
    counts: Counts,
    *,
    remat: bool,
    specs: SumSpecs,
    idle: float = 0.0,
) -> Sums:
    """Differentiate every micro-batch in the order of the schedule; call it in the per-device view.

    Args:
      schedule: the table.
      fns: the model.
      weights: this stage's blocks, stacked [chunks * k, ...] in the order of
        `schedule.virtual_stages`. k is the largest count.
      counts: [V], how many blocks each virtual stage runs, in the order of the model.
      remat: store only the input of each chunk, and run its forward again in the backward pass.
      specs: how sums of gradients are sharded over tensor.
      idle: the output of an idle pass, and the first content of ring buffers. NaN shows that no
        pass reads them.

    On each tick a stage stores the messages that arrived, runs the passes of its row, and sends
    their results. If messages are sent ahead, it sends the results of the previous tick while the
    passes run. A branch skips idle passes. Permutes are outside of branches, since every stage
    takes part in each permute.
    """
    setup = make_setup(schedule, fns, weights, counts, remat=remat, idle=idle)
    sends_ahead = schedule.ticks.message_ticks > 1

    # One tick of one stage. Arrivals, forward, backward and weight have this order in
    # `_ticks.lifetimes` too, which hands out the slots:
    #
    #   arrived x  -> inputs ------> forward --------------------------> y  -> next stage
    #                                   | activations
    #                                   v
    #   arrived dy -> cotangents -> backward --------------------------> dx -> previous stage
    #                                   | deferred (only if W is a pass of its own)
    #                                   v
    #                                weight -> sums
    def tick(carry: Carry, row: Row) -> tuple[Carry, None]:
        carry = carry._replace(
            inputs=messages.store_message(
                carry.inputs, carry.arrived_activations, row["forward_arrival"]
            ),
            cotangents=messages.store_message(
                carry.cotangents, carry.arrived_cotangents, row["backward_arrival"]
            ),
        )
        y, carry = tick_forward(setup, carry, row)
        # y: on the last stage the backward pass may follow its forward pass within one tick.
        dx, carry = tick_backward(setup, carry, row, y)
        carry = tick_weight(setup, carry, row)
        # Without this constraint the partitioner would replicate the sums over tensor.
        sums = carry.sums._replace(
            blocks=constrain_tensor(carry.sums.blocks, specs.blocks),
            outer=constrain_tensor(carry.sums.outer, specs.outer),
        )
        return (
            carry._replace(
                arrived_activations=messages.send(
                    schedule, "forward", y, carry.outgoing_activations
                ),
                arrived_cotangents=messages.send(
                    schedule, "backward", dx, carry.outgoing_cotangents
                ),
                outgoing_activations=y if sends_ahead else [],
                outgoing_cotangents=dx if sends_ahead else [],
                sums=sums,
            ),
            None,
        )

    carry, _ = jax.lax.scan(tick, initial_carry(setup), _table(schedule))
    return carry.sums


def forward_only(schedule: Schedule, fns: StageFns, weights: Arrays, counts: Counts) -> PyTree:
    """Run the forward passes alone, on their ticks.

    Return what `loss` returned, [M, ...], or zeros on all but the last stage.

    A caller can differentiate it. The backward pass then stores one input per tick and runs each
    forward again.
    """
    stage = make_stage(schedule, fns, weights, counts)
    sends_ahead = schedule.ticks.message_ticks > 1
    shapes = jax.eval_shape(fns.loss, jnp.int32(0), stage.x)
    losses = jax.tree.map(
        lambda x: jnp.zeros((schedule.num_micro_batches, *x.shape), x.dtype), shapes
    )

    @jax.checkpoint
    def tick(carry: _ForwardCarry, row: Row) -> tuple[_ForwardCarry, None]:
        inputs, arrived, outgoing, losses = carry
        inputs = messages.store_message(inputs, arrived, row["forward_arrival"])
        m = row["forward_micro_batch"]

        def run_pass(losses):
            x = messages.read_message(
                row["forward_source"], lambda: fns.embed(m), arrived, inputs, row["forward_waited"]
            )
            y = chunk_forward(
                stage.chunk(row["forward_chunk"], m), fns.block, x, differentiable=True
            )
            return y, jax.lax.cond(
                row["forward_is_last"],
                lambda: write_slot(losses, m, fns.loss(m, y)),
                lambda: losses,
            )

        y, losses = jax.lax.cond(
            m >= 0, run_pass, lambda losses: (make_filled(stage.x, 0.0), losses), losses
        )
        return (
            inputs,
            messages.send(schedule, "forward", y, outgoing),
            y if sends_ahead else [],
            losses,
        ), None

    inputs = make_buffers(stage.x, schedule.num_input_slots, 0.0)
    arrived = [make_filled(stage.x, 0.0) for _ in schedule.forward_shifts]
    # No forward pass runs after this tick; the rest of the table drains backward passes.
    num_ticks = 1 + int(schedule.ticks.passes["forward"].max())
    rows = {
        name: column[:num_ticks]
        for name, column in _table(schedule).items()
        if name.startswith("forward")
    }
    outgoing = make_filled(stage.x, 0.0) if sends_ahead else []
    return jax.lax.scan(tick, (inputs, arrived, outgoing, losses), rows)[0][3]


def tick_forward(setup: Setup, carry: Carry, row: Row) -> tuple[Arrays, Carry]:
    """Run the forward pass of this tick.

    Return its output, which goes to the next stage, and the new carry.
    """
    fns = setup.stage.fns

    def run_pass(activations, outputs):
        m = row["forward_micro_batch"]
        slot = row["forward_slot"]
        x = messages.read_message(
            row["forward_source"],
            lambda: fns.embed(m),
            carry.arrived_activations,
            carry.inputs,
            row["forward_waited"],
        )
        chunk = setup.stage.chunk(row["forward_chunk"], m)
        if setup.remat:
            # The backward pass of the last chunk runs this forward anyway.
            y = jax.lax.cond(
                row["forward_is_last"], lambda: x, lambda: chunk_forward(chunk, fns.block, x)
            )
            return y, write_slot(activations, slot, x), outputs
        # The slot holds the residuals of all blocks of the chunk, until the last pass that reads
        # them.
        y, activations = chunk_forward_keeping(
            chunk, setup.passes, x, _same_slot(activations, slot)
        )
        if outputs:
            outputs = jax.lax.cond(
                row["forward_is_last"], write_slot, lambda outputs, *_: outputs, outputs, slot, y
            )
        return y, activations, outputs

    def skip_pass(activations, outputs):
        return make_filled(setup.stage.x, setup.idle), activations, outputs

    busy = row["forward_micro_batch"] >= 0
    y, activations, outputs = jax.lax.cond(
        busy, run_pass, skip_pass, carry.activations, carry.outputs
    )
    return y, carry._replace(activations=activations, outputs=outputs)


def tick_backward(setup: Setup, carry: Carry, row: Row, y: Arrays) -> tuple[Arrays, Carry]:
    """Run the backward pass of this tick.

    Return the gradient of its input, for the previous stage, and the new carry.
    """
    fns = setup.stage.fns
    has_weight_pass = setup.stage.schedule.ticks.weight is not None

    def run_pass(deferred, sums):
        m = row["backward_micro_batch"]
        slot = row["backward_slot"]
        chunk = setup.stage.chunk(row["backward_chunk"], m)
        if setup.remat:
            # The forward pass runs again, and what the weight pass needs goes straight to its
            # deferred slot.
            residuals = _recomputed_slots(setup, deferred, row)
            x = read_slot(carry.activations, slot)
            chunk_output, buffers = chunk_forward_keeping(chunk, setup.passes, x, residuals)
            residuals = residuals._replace(buffers=buffers)
        else:
            residuals = _same_slot(carry.activations, slot)
            # Without `outputs` every loss follows its forward pass within the tick, see
            # `initial_carry`.
            chunk_output = read_slot(carry.outputs, slot) if carry.outputs else y

        dy, sums = _output_gradient(fns, carry, row, chunk_output, sums)
        if has_weight_pass:
            deferred_slots = _same_slot(
                deferred[: len(setup.passes.deferred)], row["backward_deferred"]
            )
            dx, new_deferred = chunk_backward_deferring(
                chunk, setup.passes, residuals, dy, deferred_slots
            )
            deferred = [*new_deferred, *(residuals.buffers[i] for i in setup.residuals_for_weight)]
        else:
            dx, block_grads = chunk_backward(
                chunk, setup.passes, residuals, dy, sums.blocks, fns.reduce
            )
            sums = sums._replace(blocks=block_grads)
        outer = jax.lax.cond(
            row["backward_is_first"],
            lambda outer: add(outer, fns.embed_grads(m, dx)),
            lambda outer: outer,
            sums.outer,
        )
        return dx, deferred, sums._replace(outer=outer)

    def skip_pass(deferred, sums):
        return make_filled(setup.dx, setup.idle), deferred, sums

    busy = row["backward_micro_batch"] >= 0
    dx, deferred, sums = jax.lax.cond(busy, run_pass, skip_pass, carry.deferred, carry.sums)
    return dx, carry._replace(deferred=deferred, sums=sums)


def _output_gradient(
    fns: StageFns, carry: Carry, row: Row, chunk_output: Arrays, sums: Sums
) -> tuple[Arrays, Sums]:
    """Return the gradient of a chunk's output: of the loss on the last chunk, otherwise from the
    next stage.
    """
    m = row["backward_micro_batch"]

    def gradient_of_loss(sums):
        dy, outer_grads, parts = fns.loss_grads(m, chunk_output)
        all_parts = write_slot(sums.parts, m, parts)
        return dy, sums._replace(outer=add(sums.outer, outer_grads), parts=all_parts)

    def gradient_from_next_stage(sums):
        return (
            messages.read_message(
                row["backward_source"],
                None,
                carry.arrived_cotangents,
                carry.cotangents,
                row["backward_waited"],
            ),
            sums,
        )

    # A single virtual stage gets no messages, and `read_message` would have no branch.
    if not (carry.arrived_cotangents or carry.cotangents):
        return gradient_of_loss(sums)
    return jax.lax.cond(row["backward_is_last"], gradient_of_loss, gradient_from_next_stage, sums)


def tick_weight(setup: Setup, carry: Carry, row: Row) -> Carry:
    """Run the weight pass of this tick, if the schedule has weight passes; return the new carry."""
    if setup.stage.schedule.ticks.weight is None:
        return carry

    def run_pass(blocks):
        chunk = setup.stage.chunk(row["weight_chunk"], row["weight_micro_batch"])
        num_deferred = len(setup.passes.deferred)
        slot = row["weight_deferred"]
        deferred_slots = _same_slot(carry.deferred[:num_deferred], slot)
        if setup.remat:
            residuals = _same_slot(carry.deferred[num_deferred:], slot)
        else:
            residuals = _same_slot(
                [carry.activations[i] for i in setup.passes.weight_residuals], row["weight_slot"]
            )
        return chunk_weight(
            chunk, setup.passes, residuals, deferred_slots, blocks, setup.stage.fns.reduce
        )

    busy = row["weight_micro_batch"] >= 0
    blocks = jax.lax.cond(busy, run_pass, lambda blocks: blocks, carry.sums.blocks)
    return carry._replace(sums=carry.sums._replace(blocks=blocks))


def _same_slot(buffers: Arrays, slot: jax.Array) -> BufferSlots:
    return BufferSlots(buffers, [slot] * len(buffers))


def _recomputed_slots(setup: Setup, deferred: Arrays, row: Row) -> BufferSlots:
    """Return where the recomputed forward stores residuals.

    `deferred` holds the residuals that the weight pass reads. The other residuals live for this
    tick only.
    """
    buffers = make_buffers(setup.passes.residuals, setup.stage.num_blocks, 0.0)
    slots: list[Index] = [0] * len(buffers)
    for position, i in enumerate(setup.residuals_for_weight, len(setup.passes.deferred)):
        buffers[i], slots[i] = deferred[position], row["backward_deferred"]
    return BufferSlots(buffers, slots)


def _table(schedule: Schedule) -> Row:
    """Return this stage's columns of the table, [num_ticks, ...], and the source that each pass
    reads.
    """
    table = schedule.table()
    stage_of = schedule.ticks.stage_of
    virtual_stages = np.asarray(schedule.virtual_stages)
    for kind, shifts in (
        ("forward", schedule.forward_shifts),
        ("backward", schedule.backward_shifts),
    ):
        table[f"{kind}_source"] = messages.message_sources(table, kind, len(shifts))
        stage = np.arange(schedule.num_stages)
        virtual_stage = np.where(
            table[f"{kind}_micro_batch"] >= 0, virtual_stages[stage, table[f"{kind}_chunk"]], -1
        )
        table[f"{kind}_is_first"] = virtual_stage == 0
        table[f"{kind}_is_last"] = virtual_stage == len(stage_of) - 1
    stage = jax.lax.axis_index(PIPELINE)
    return {name: jnp.asarray(column)[:, stage] for name, column in table.items()}
