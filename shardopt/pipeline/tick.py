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
    parts = run.stage.parts

    def work(activations, outputs):
        m, slot = row["forward_micro_batch"], row["forward_slot"]
        x = messages.choose(
            row["forward_source"], lambda: parts.embed(m), carry.arrived, carry.inputs, row["forward_waited"]
        )
        chunk = run.stage.chunk(row["forward_chunk"], m)
        if run.remat:
            # The backward pass of the last chunk runs it anyway.
            y = jax.lax.cond(row["forward_is_last"], lambda: x, lambda: chunks.forward(chunk, parts.block, x))
            return y, rings.put(activations, slot, x), outputs
        y, activations = chunks.forward_keeping(chunk, run.passes, x, _place(activations, slot))
        if outputs:
            outputs = jax.lax.cond(row["forward_is_last"], rings.put, lambda ring, *_: ring, outputs, slot, y)
        return y, activations, outputs

    def idle(activations, outputs):
        return rings.blank(run.stage.x, run.idle), activations, outputs

    busy = row["forward_micro_batch"] >= 0
    y, activations, outputs = jax.lax.cond(busy, work, idle, carry.activations, carry.outputs)
    return y, carry._replace(activations=activations, outputs=outputs)


def backward(run: Run, carry: Carry, row: Row, y: Arrays) -> tuple[Arrays, Carry]:
    """Run the backward pass of this tick; the gradient that it made, for the stage before."""
    parts, splits = run.stage.parts, run.stage.schedule.ticks.weight is not None

    def work(deferred, sums):
        m, slot = row["backward_micro_batch"], row["backward_slot"]
        chunk = run.stage.chunk(row["backward_chunk"], m)
        if run.remat:
            kept = _place_again(run, deferred, row)
            last, again = chunks.forward_keeping(chunk, run.passes, rings.take(carry.activations, slot), kept)
            kept = kept._replace(rings=again)
        else:
            kept = _place(carry.activations, slot)
            last = rings.take(carry.outputs, slot) if carry.outputs else y

        def at_loss(sums):
            dy, grads, totals = parts.loss_grads(m, last)
            stacked = rings.put_tree(sums.parts, m, totals)
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
            dx, made = chunks.backward_deferring(chunk, run.passes, kept, dy, left)
            deferred = [*made, *(kept.rings[i] for i in run.keeps_for_weight)]
        else:
            dx, blocks = chunks.backward(chunk, run.passes, kept, dy, sums.blocks, parts.reduce)
            sums = sums._replace(blocks=blocks)
        outer = jax.lax.cond(
            row["backward_is_first"],
            lambda outer: _add(outer, parts.embed_grads(m, dx)),
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
        return chunks.weight(chunk, run.passes, kept, left, blocks, run.stage.parts.reduce)

    busy = row["weight_micro_batch"] >= 0
    blocks = jax.lax.cond(busy, work, lambda blocks: blocks, carry.sums.blocks)
    return carry._replace(sums=carry.sums._replace(blocks=blocks))


def _place(ring: Arrays, slot: Any) -> chunks.Place:
    return chunks.Place(ring, [slot] * len(ring))


def _place_again(run: Run, deferred: Arrays, row: Row) -> chunks.Place:
    """Return where a forward run again keeps things: what the weight pass reads among `deferred`, the rest for this tick."""
    again: Arrays = rings.make(run.passes.kept, run.stage.num_blocks, 0.0)
    slots: list[Any] = [0] * len(again)
    for at, i in enumerate(run.keeps_for_weight, len(run.passes.deferred)):
        again[i], slots[i] = deferred[at], row["backward_deferred"]
    return chunks.Place(again, slots)


def _add(sums: Arrays, grads: Arrays) -> Arrays:
    return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
