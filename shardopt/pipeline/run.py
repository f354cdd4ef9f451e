"""What a pipeline runs, and what it holds while it runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, wide_dtype
from shardopt.pipeline import rings
from shardopt.pipeline.chunk import Chunk
from shardopt.pipeline.messages import PIPELINE
from shardopt.pipeline.passes import Passes, rematerialised, take_apart
from shardopt.pipeline.rings import Arrays
from shardopt.pipeline.schedule import Schedule


class Parts(NamedTuple):
    """A model as functions of local arrays and of m, the number of a micro-batch; lists of arrays throughout.

    Attributes:
      embed: `embed(m) -> x`, the input of the first block.
      embed_grads: `embed_grads(m, dx) -> grads` of the outer weights.
      loss: `loss(m, x) -> parts`, a pytree of numbers.
      loss_grads: `loss_grads(m, x) -> (dx, grads, parts)`, grads of the outer weights.
      block: `block(given, x) -> y`, with given = [*weights of the block, its number in the model, m].
      trained: which weights of a block have gradients.
      reduce: `reduce(dw) -> grads`, what becomes of a block's weight gradient before it is added up.
      remat_blocks: whether of a block only the input is kept, and its forward run again in its backward pass.
    """

    embed: Callable[[Any], Arrays]
    embed_grads: Callable[[Any, Arrays], Arrays]
    loss: Callable[[Any, Arrays], PyTree]
    loss_grads: Callable[[Any, Arrays], tuple[Arrays, Arrays, PyTree]]
    block: Callable[[Arrays, Arrays], Arrays]
    trained: Sequence[int]
    reduce: Callable[[Arrays], Arrays]
    remat_blocks: bool


class Sums(NamedTuple):
    """The sums over micro-batches that a stage has: of its own blocks, and of the ends of the model that it holds.

    Attributes:
      blocks: gradients [chunks * k, ...] of the trained weights, in fp32 at least.
      outer: gradients of the outer weights, in fp32 at least; zeros on stages that hold no end of the model.
      parts: what `loss` returned, stacked [M, ...]; zeros but on the stage of the last block.
    """

    blocks: Arrays
    outer: Arrays
    parts: PyTree


class Stage(NamedTuple):
    """The blocks of a stage; see `execute` for the first three.

    Attributes:
      schedule: the table.
      parts: the model.
      weights: of this stage's blocks, [chunks * k, ...].
      x: the shapes of what travels from block to block.
      num_blocks: k, the blocks of a chunk.
      virtual: [chunks], this stage's virtual stages.
    """

    schedule: Schedule
    parts: Parts
    weights: Arrays
    x: Arrays
    num_blocks: int
    virtual: Any

    def chunk(self, number: Any, m: Any) -> Chunk:
        """Return the blocks of a chunk of this stage, for micro-batch m."""
        first, block = number * self.num_blocks, self.virtual[number] * self.num_blocks

        def given(j):
            return [*rings.take(self.weights, first + j), block + j, m]

        return Chunk(self.num_blocks, first, given)


class Run(NamedTuple):
    """What is fixed while a pipeline is differentiated; see `execute` for `remat` and `idle`.

    Attributes:
      stage: its blocks.
      remat: whether the backward pass runs the forward again.
      idle: what an idle pass hands on.
      dx: the shapes of the floating leaves of x, which have gradients.
      passes: a block taken apart.
      at_once: whether the last virtual stage runs each backward on the tick of its forward.
    """

    stage: Stage
    remat: bool
    idle: float
    dx: Arrays
    passes: Passes
    at_once: bool

    @property
    def keeps_for_weight(self) -> tuple[int, ...]:
        """Which of what a forward keeps lies with what the backward pass leaves for the weight pass.

        The activations lie in their slot until then, unless they are made again for the backward pass.
        """
        return self.passes.weight_keeps if self.remat and self.stage.schedule.ticks.weight is not None else ()


class Carry(NamedTuple):
    """What goes from tick to tick; a ring is a list of arrays [slots, ...], empty where nothing is kept."""

    inputs: Arrays
    activations: Arrays
    outputs: Arrays
    cotangents: Arrays
    deferred: Arrays
    arrived: list[Arrays]
    returned: list[Arrays]
    sums: Sums


def lay_out(schedule: Schedule, parts: Parts, weights: Arrays) -> Stage:
    """Work out which blocks this stage runs."""
    return Stage(
        schedule=schedule,
        parts=parts,
        weights=weights,
        x=jax.eval_shape(parts.embed, jnp.int32(0)),
        num_blocks=weights[0].shape[0] // schedule.num_chunks,
        virtual=jnp.asarray(schedule.virtual_stages, jnp.int32)[jax.lax.axis_index(PIPELINE)],
    )


def prepare(schedule: Schedule, parts: Parts, weights: Arrays, *, remat: bool, idle: float) -> Run:
    """Trace the block once with its gradients, and work out what is fixed."""
    stage, m = lay_out(schedule, parts, weights), jnp.int32(0)
    given = [*(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights), m, m]
    passes = take_apart(parts.block, given, stage.x, trained=parts.trained)
    return Run(
        stage=stage,
        remat=remat,
        idle=idle,
        dx=[one for one in stage.x if jnp.issubdtype(one.dtype, jnp.inexact)],
        passes=rematerialised(passes, stage.x) if parts.remat_blocks else passes,
        at_once=schedule.ticks.forward[-1] == schedule.ticks.backward[-1],
    )


def start(run: Run) -> Carry:
    """Return the empty rings and the zero sums of the first tick."""
    schedule, x, k, idle = run.stage.schedule, run.stage.x, run.stage.num_blocks, run.idle
    deferred = [*run.passes.deferred, *(run.passes.kept[i] for i in run.keeps_for_weight)]
    return Carry(
        inputs=rings.make(x, schedule.num_input_slots, idle),
        activations=rings.make(x if run.remat else run.passes.kept, schedule.num_slots * (1 if run.remat else k), idle),
        outputs=rings.make(x, 0 if run.remat or run.at_once else schedule.num_slots, idle),
        cotangents=rings.make(run.dx, schedule.num_cotangent_slots, idle),
        deferred=rings.make(deferred, schedule.num_deferred_slots * k, idle),
        arrived=[rings.blank(x, idle) for _ in schedule.forward_shifts],
        returned=[rings.blank(run.dx, idle) for _ in schedule.backward_shifts],
        sums=_zero_sums(run.stage),
    )


def _zero_sums(stage: Stage) -> Sums:
    shape = lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype)  # noqa: E731
    dw = jax.eval_shape(stage.parts.reduce, [shape(stage.weights[i]) for i in stage.parts.trained])
    _, outer, parts = jax.eval_shape(stage.parts.loss_grads, jnp.int32(0), stage.x)
    return Sums(
        blocks=[jnp.zeros((stage.weights[0].shape[0], *one.shape), wide_dtype(one.dtype)) for one in dw],
        outer=[jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in outer],
        parts=jax.tree.map(lambda one: jnp.zeros((stage.schedule.num_micro_batches, *one.shape), one.dtype), parts),
    )
