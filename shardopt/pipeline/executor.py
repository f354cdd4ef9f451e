"""One program for every schedule: a scan over the rows of its table, each tick doing what the row says."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.core.types import PyTree
from shardopt.pipeline import messages, rings
from shardopt.pipeline.messages import PIPELINE
from shardopt.pipeline.rings import Arrays
from shardopt.pipeline.run import (
    Carry,
    Place,
    Run,
    StageFns,
    Sums,
    chunk_backward,
    chunk_backward_deferring,
    chunk_forward,
    chunk_forward_keeping,
    chunk_weight,
    lay_out,
    prepare,
    start,
)
from shardopt.pipeline.schedule import Schedule

# One tick of a stage: forward, backward, weight, each run or skipped as its row of the table says.


Row = dict[str, Any]


def tick_forward(run: Run, carry: Carry, row: Row) -> tuple[Arrays, Carry]:
    """Run the forward pass of this tick; what it made, for the next stage."""
    parts = run.stage.parts

    def work(activations, outputs):
        m, slot = row["forward_micro_batch"], row["forward_slot"]
        x = messages.choose(
            row["forward_source"], lambda: parts.embed(m), carry.arrived, carry.inputs, row["forward_waited"]
        )
        chunk = run.stage.chunk(row["forward_chunk"], m)
        if run.remat:
            # The backward pass of the last chunk runs it anyway.
            y = jax.lax.cond(row["forward_is_last"], lambda: x, lambda: chunk_forward(chunk, parts.block, x))
            return y, rings.write_slot(activations, slot, x), outputs
        y, activations = chunk_forward_keeping(chunk, run.passes, x, _place(activations, slot))
        if outputs:
            outputs = jax.lax.cond(row["forward_is_last"], rings.write_slot, lambda ring, *_: ring, outputs, slot, y)
        return y, activations, outputs

    def idle(activations, outputs):
        return rings.blank_ring(run.stage.x, run.idle), activations, outputs

    busy = row["forward_micro_batch"] >= 0
    y, activations, outputs = jax.lax.cond(busy, work, idle, carry.activations, carry.outputs)
    return y, carry._replace(activations=activations, outputs=outputs)


def tick_backward(run: Run, carry: Carry, row: Row, y: Arrays) -> tuple[Arrays, Carry]:
    """Run the backward pass of this tick; the gradient that it made, for the stage before."""
    parts, splits = run.stage.parts, run.stage.schedule.ticks.weight is not None

    def work(deferred, sums):
        m, slot = row["backward_micro_batch"], row["backward_slot"]
        chunk = run.stage.chunk(row["backward_chunk"], m)
        if run.remat:
            kept = _place_again(run, deferred, row)
            last, again = chunk_forward_keeping(chunk, run.passes, rings.read_slot(carry.activations, slot), kept)
            kept = kept._replace(rings=again)
        else:
            kept = _place(carry.activations, slot)
            last = rings.read_slot(carry.outputs, slot) if carry.outputs else y

        def at_loss(sums):
            dy, grads, totals = parts.loss_grads(m, last)
            stacked = rings.write_tree(sums.parts, m, totals)
            return dy, sums._replace(outer=_add(sums.outer, grads), parts=stacked)

        def from_next(sums):
            return messages.choose(
                row["backward_source"], None, carry.returned, carry.cotangents, row["backward_waited"]
            ), sums

        if carry.returned or carry.cotangents:
            dy, sums = jax.lax.cond(row["backward_is_last"], at_loss, from_next, sums)
        else:
            dy, sums = at_loss(sums)
        if splits:
            left = _place(deferred[: len(run.passes.deferred)], row["backward_deferred"])
            dx, made = chunk_backward_deferring(chunk, run.passes, kept, dy, left)
            deferred = [*made, *(kept.rings[i] for i in run.keeps_for_weight)]
        else:
            dx, blocks = chunk_backward(chunk, run.passes, kept, dy, sums.blocks, parts.reduce)
            sums = sums._replace(blocks=blocks)
        outer = jax.lax.cond(
            row["backward_is_first"],
            lambda outer: _add(outer, parts.embed_grads(m, dx)),
            lambda outer: outer,
            sums.outer,
        )
        return dx, deferred, sums._replace(outer=outer)

    def idle(deferred, sums):
        return rings.blank_ring(run.dx, run.idle), deferred, sums

    busy = row["backward_micro_batch"] >= 0
    dx, deferred, sums = jax.lax.cond(busy, work, idle, carry.deferred, carry.sums)
    return dx, carry._replace(deferred=deferred, sums=sums)


def tick_weight(run: Run, carry: Carry, row: Row) -> Carry:
    """Run the weight pass of this tick, where the schedule splits it off."""
    if run.stage.schedule.ticks.weight is None:
        return carry

    def work(blocks):
        chunk = run.stage.chunk(row["weight_chunk"], row["weight_micro_batch"])
        num, slot = len(run.passes.deferred), row["weight_deferred"]
        left = _place(carry.deferred[:num], slot)
        if run.remat:
            kept = _place(carry.deferred[num:], slot)
        else:
            kept = _place([carry.activations[i] for i in run.passes.weight_keeps], row["weight_slot"])
        return chunk_weight(chunk, run.passes, kept, left, blocks, run.stage.parts.reduce)

    busy = row["weight_micro_batch"] >= 0
    blocks = jax.lax.cond(busy, work, lambda blocks: blocks, carry.sums.blocks)
    return carry._replace(sums=carry.sums._replace(blocks=blocks))


def _place(ring: Arrays, slot: Any) -> Place:
    return Place(ring, [slot] * len(ring))


def _place_again(run: Run, deferred: Arrays, row: Row) -> Place:
    """Return where a forward run again keeps things: what the weight pass reads among `deferred`, the rest for this tick."""
    again: Arrays = rings.make_ring(run.passes.kept, run.stage.num_blocks, 0.0)
    slots: list[Any] = [0] * len(again)
    for at, i in enumerate(run.keeps_for_weight, len(run.passes.deferred)):
        again[i], slots[i] = deferred[at], row["backward_deferred"]
    return Place(again, slots)


def _add(sums: Arrays, grads: Arrays) -> Arrays:
    return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]


def execute(
    schedule: Schedule,
    parts: StageFns,
    weights: Arrays,
    *,
    remat: bool,
    block_specs: Sequence[PartitionSpec],
    outer_specs: Sequence[PartitionSpec],
    idle: float = 0.0,
) -> Sums:
    """Differentiate every micro-batch as the schedule says; call it in the per-device view.

    Each tick a stage puts arrived messages down, runs the passes that its row names, and sends on what they made.
    A pass without work is skipped by a branch; the permutes stand outside of branches, since every stage takes part.

    Args:
      schedule: the table.
      parts: what to run.
      weights: this stage's blocks, stacked [chunks * k, ...] in the order of `schedule.virtual_stages`.
      remat: keep the input of each chunk, and run its forward again in the backward pass, rather than what that needs.
      block_specs: how the gradient of each trained weight, stacked, lies over tensor.
      outer_specs: the same of the outer weights.
      idle: what an idle pass hands on and rings begin with; NaN shows that nobody reads it.
    """
    run = prepare(schedule, parts, weights, remat=remat, idle=idle)

    def one(carry: Carry, row: Row) -> tuple[Carry, None]:
        carry = carry._replace(
            inputs=messages.store_message(carry.inputs, carry.arrived, row["forward_arrival"]),
            cotangents=messages.store_message(carry.cotangents, carry.returned, row["backward_arrival"]),
        )
        y, carry = tick_forward(run, carry, row)
        dx, carry = tick_backward(run, carry, row, y)
        carry = tick_weight(run, carry, row)
        # Left alone, the partitioner would keep the sums whole over tensor.
        sums = carry.sums._replace(
            blocks=_constrained(carry.sums.blocks, block_specs), outer=_constrained(carry.sums.outer, outer_specs)
        )
        return carry._replace(
            arrived=messages.send(schedule, "forward", y),
            returned=messages.send(schedule, "backward", dx),
            sums=sums,
        ), None

    carry, _ = jax.lax.scan(one, start(run), _rows(schedule))
    return carry.sums


def forward_only(schedule: Schedule, parts: StageFns, weights: Arrays) -> PyTree:
    """Run the forward passes alone, on their ticks; what `loss` returned, [M, ...], zeros but on the last stage.

    It can be differentiated, at the price of keeping one input a tick and running each forward again.
    """
    stage = lay_out(schedule, parts, weights)
    shapes = jax.eval_shape(parts.loss, jnp.int32(0), stage.x)
    totals = jax.tree.map(lambda x: jnp.zeros((schedule.num_micro_batches, *x.shape), x.dtype), shapes)

    @jax.checkpoint
    def one(carry, row):
        inputs, arrived, totals = carry
        inputs = messages.store_message(inputs, arrived, row["forward_arrival"])
        m = row["forward_micro_batch"]

        def work(totals):
            x = messages.choose(row["forward_source"], lambda: parts.embed(m), arrived, inputs, row["forward_waited"])
            y = chunk_forward(stage.chunk(row["forward_chunk"], m), parts.block, x)
            return y, jax.lax.cond(
                row["forward_is_last"], lambda: rings.write_tree(totals, m, parts.loss(m, y)), lambda: totals
            )

        y, totals = jax.lax.cond(m >= 0, work, lambda totals: (rings.blank_ring(stage.x, 0.0), totals), totals)
        return (inputs, messages.send(schedule, "forward", y), totals), None

    inputs = rings.make_ring(stage.x, schedule.num_input_slots, 0.0)
    arrived = [rings.blank_ring(stage.x, 0.0) for _ in schedule.forward_shifts]
    num_ticks = 1 + int(schedule.ticks.passes["forward"].max())
    rows = {name: column[:num_ticks] for name, column in _rows(schedule).items() if name.startswith("forward")}
    return jax.lax.scan(one, (inputs, arrived, totals), rows)[0][2]


def _constrained(leaves: Arrays, specs: Sequence[PartitionSpec]) -> Arrays:
    return [jax.lax.with_sharding_constraint(x, spec) for x, spec in zip(leaves, specs, strict=True)]


def _rows(schedule: Schedule) -> dict[str, Any]:
    """Return this stage's columns of the table, [num_ticks, ...], with which source each pass reads."""
    table = schedule.rows()
    stage_of, virtual = schedule.ticks.stage_of, np.asarray(schedule.virtual_stages)
    for kind, shifts in (("forward", schedule.forward_shifts), ("backward", schedule.backward_shifts)):
        table[f"{kind}_source"] = messages.sources(table, kind, len(shifts))
        stage = np.arange(schedule.num_stages)
        at = np.where(table[f"{kind}_micro_batch"] >= 0, virtual[stage, table[f"{kind}_chunk"]], -1)
        table[f"{kind}_is_first"] = at == 0
        table[f"{kind}_is_last"] = at == len(stage_of) - 1
    stage = jax.lax.axis_index(PIPELINE)
    return {name: jnp.asarray(column)[:, stage] for name, column in table.items()}
