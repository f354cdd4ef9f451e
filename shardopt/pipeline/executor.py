"""One program for every schedule: a scan over the rows of its table, each tick doing what the row says."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.core.types import PyTree
from shardopt.pipeline import chunk as chunks
from shardopt.pipeline import messages, rings, tick
from shardopt.pipeline.messages import PIPELINE
from shardopt.pipeline.rings import Arrays
from shardopt.pipeline.run import Carry, Parts, Sums, lay_out, prepare, start
from shardopt.pipeline.schedule import Schedule


def execute(
    schedule: Schedule,
    parts: Parts,
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

    def one(carry: Carry, row: tick.Row) -> tuple[Carry, None]:
        carry = carry._replace(
            inputs=messages.put_down(carry.inputs, carry.arrived, row["forward_arrival"]),
            cotangents=messages.put_down(carry.cotangents, carry.returned, row["backward_arrival"]),
        )
        y, carry = tick.forward(run, carry, row)
        dx, carry = tick.backward(run, carry, row, y)
        carry = tick.weight(run, carry, row)
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


def forward_only(schedule: Schedule, parts: Parts, weights: Arrays) -> PyTree:
    """Run the forward passes alone, on their ticks; what `loss` returned, [M, ...], zeros but on the last stage.

    It can be differentiated, at the price of keeping one input a tick and running each forward again.
    """
    stage = lay_out(schedule, parts, weights)
    shapes = jax.eval_shape(parts.loss, jnp.int32(0), stage.x)
    totals = jax.tree.map(lambda x: jnp.zeros((schedule.num_micro_batches, *x.shape), x.dtype), shapes)

    @jax.checkpoint
    def one(carry, row):
        inputs, arrived, totals = carry
        inputs = messages.put_down(inputs, arrived, row["forward_arrival"])
        m = row["forward_micro_batch"]

        def work(totals):
            x = messages.choose(row["forward_source"], lambda: parts.embed(m), arrived, inputs, row["forward_waited"])
            y = chunks.forward(stage.chunk(row["forward_chunk"], m), parts.block, x)
            return y, jax.lax.cond(
                row["forward_is_last"], lambda: rings.put_tree(totals, m, parts.loss(m, y)), lambda: totals
            )

        y, totals = jax.lax.cond(m >= 0, work, lambda totals: (rings.blank(stage.x, 0.0), totals), totals)
        return (inputs, messages.send(schedule, "forward", y), totals), None

    inputs = rings.make(stage.x, schedule.num_input_slots, 0.0)
    arrived = [rings.blank(stage.x, 0.0) for _ in schedule.forward_shifts]
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
