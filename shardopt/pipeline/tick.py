"""One tick of a stage: forward, backward, weight, each run or skipped as its row of the table says."""

from typing import Any

import jax

from shardopt.pipeline import chunk as chunks
from shardopt.pipeline import messages, rings
from shardopt.pipeline.rings import Arrays
from shardopt.pipeline.run import Carry, Run

Row = dict[str, Any]


def forward(run: Run, carry: Carry, row: Row) -> tuple[Arrays, Carry]:
    """Run the forward pass of this tick; what it made, for the next stage."""

    def work(activations, outputs):
        m, slot = row["forward_micro_batch"], row["forward_slot"]
        x = messages.choose(
            row["forward_source"], lambda: run.parts.embed(m), carry.arrived, carry.inputs, row["forward_waited"]
        )
        chunk = run.chunk(row["forward_chunk"], m)
        if run.remat:
            # The backward pass of the last chunk runs it anyway.
            y = jax.lax.cond(row["forward_is_last"], lambda: x, lambda: chunks.forward(chunk, run.parts.block, x))
            return y, rings.put(activations, slot, x), outputs
        y, activations = chunks.forward_keeping(chunk, x, activations, slot)
        if outputs:
            outputs = jax.lax.cond(row["forward_is_last"], rings.put, lambda ring, *_: ring, outputs, slot, y)
        return y, activations, outputs

    def idle(activations, outputs):
        return rings.blank(run.x, run.idle), activations, outputs

    busy = row["forward_micro_batch"] >= 0
    y, activations, outputs = jax.lax.cond(busy, work, idle, carry.activations, carry.outputs)
    return y, carry._replace(activations=activations, outputs=outputs)


def backward(run: Run, carry: Carry, row: Row, y: Arrays) -> tuple[Arrays, Carry]:
    """Run the backward pass of this tick; the gradient that it made, for the stage before."""
    splits = run.schedule.ticks.weight is not None

    def work(deferred, sums):
        m, slot = row["backward_micro_batch"], row["backward_slot"]
        chunk = run.chunk(row["backward_chunk"], m)
        ring, last = carry.activations, y
        if run.remat:
            again = rings.make(run.passes.kept, run.num_blocks, 0.0)
            last, ring = chunks.forward_keeping(chunk, rings.take(carry.activations, slot), again, 0)
            slot = 0
        elif carry.outputs:
            last = rings.take(carry.outputs, slot)

        def at_loss(sums):
            dy, grads, parts = run.parts.loss_grads(m, last)
            stacked = rings.put_tree(sums.parts, m, parts)
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
            dx, deferred = chunks.backward_deferring(
                chunk, ring, slot, dy, deferred, row["backward_deferred"], keep=run.keeps_for_weight
            )
        else:
            dx, blocks = chunks.backward(chunk, ring, slot, dy, sums.blocks)
            sums = sums._replace(blocks=blocks)
        outer = jax.lax.cond(
            row["backward_is_first"],
            lambda outer: _add(outer, run.parts.embed_grads(m, dx)),
            lambda outer: outer,
            sums.outer,
        )
        return dx, deferred, sums._replace(outer=outer)

    def idle(deferred, sums):
        return rings.blank(run.dx, run.idle), deferred, sums

    busy = row["backward_micro_batch"] >= 0
    dx, deferred, sums = jax.lax.cond(busy, work, idle, carry.deferred, carry.sums)
    return dx, carry._replace(deferred=deferred, sums=sums)


def weight(run: Run, carry: Carry, row: Row) -> Carry:
    """Run the weight pass of this tick, where the schedule splits it off."""
    if run.schedule.ticks.weight is None:
        return carry

    def work(blocks):
        chunk = run.chunk(row["weight_chunk"], row["weight_micro_batch"])
        k, num_deferred = run.num_blocks, len(run.passes.deferred)

        def left(j):
            return rings.take(carry.deferred, row["weight_deferred"] * k + j)

        def kept(j):
            if run.remat:
                return left(j)[num_deferred:]
            ring = [carry.activations[i] for i in run.passes.weight_keeps]
            return rings.take(ring, row["weight_slot"] * k + j)

        return chunks.weight(chunk, kept, lambda j: left(j)[:num_deferred], blocks)

    busy = row["weight_micro_batch"] >= 0
    blocks = jax.lax.cond(busy, work, lambda blocks: blocks, carry.sums.blocks)
    return carry._replace(sums=carry.sums._replace(blocks=blocks))


def _add(sums: Arrays, grads: Arrays) -> Arrays:
    return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
