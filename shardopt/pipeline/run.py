"""What a pipeline runs, and what it holds while it runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, wide_dtype
from shardopt.pipeline import rings
from shardopt.pipeline.messages import PIPELINE
from shardopt.pipeline.rings import Arrays
from shardopt.pipeline.schedule import Schedule
from shardopt.remat.split_backward import Passes, rematerialised, split_backward

# A chunk, the blocks that a stage runs one after another, forwards and backwards, with what it keeps in rings.


Reduce = Callable[[Arrays], Arrays]
"""What a block's weight gradient goes through before it is added up."""


class Chunk(NamedTuple):
    """The blocks of one chunk of one micro-batch, for the tick at hand.

    Attributes:
      num_blocks: k, how many there are in a chunk.
      first: where the first of them lies in this stage's weights and gradients, [chunks * k, ...].
      given: `given(j)`: the weights and other arguments of block j of the chunk.
    """

    num_blocks: int
    first: Any
    given: Callable[[Any], Arrays]


class Place(NamedTuple):
    """Where a chunk keeps what its blocks leave for later: of each ring, one slot of k places.

    Attributes:
      rings: arrays [slots * k, ...].
      slots: which slot, of each.
    """

    rings: Arrays
    slots: Sequence[Any]


def chunk_forward(chunk: Chunk, block: Callable[[Arrays, Arrays], Arrays], x: Arrays) -> Arrays:
    """Run the blocks, keeping nothing."""
    return _over_blocks(chunk, x, lambda j, x: block(chunk.given(j), x))


def chunk_forward_keeping(chunk: Chunk, passes: Passes, x: Arrays, kept: Place) -> tuple[Arrays, Arrays]:
    """Run the blocks, and put down what the backward pass needs of each; return the output and the rings."""

    def one(j, carry):
        x, ring = carry
        y, left = passes.forward(chunk.given(j), x)
        return y, _put_chunk(chunk, kept._replace(rings=ring), j, left)

    return _over_blocks(chunk, (x, kept.rings), one)


def chunk_backward(
    chunk: Chunk, passes: Passes, kept: Place, dy: Arrays, grads: Arrays, reduce: Reduce
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and add those of the weights to `grads`."""

    def one(j, carry):
        dy, grads = carry
        dx, dw = passes.both(chunk.given(j), _take_chunk(chunk, kept, j), dy)
        return dx, rings.add_to_slot(grads, chunk.first + j, reduce(dw))

    return _over_blocks(chunk, (dy, grads), one, reverse=True)


def chunk_backward_deferring(
    chunk: Chunk, passes: Passes, kept: Place, dy: Arrays, deferred: Place
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and put down what the weight pass needs; return it and the rings."""

    def one(j, carry):
        dy, ring = carry
        dx, left = passes.backward(chunk.given(j), _take_chunk(chunk, kept, j), dy)
        return dx, _put_chunk(chunk, deferred._replace(rings=ring), j, left)

    return _over_blocks(chunk, (dy, deferred.rings), one, reverse=True)


def chunk_weight(chunk: Chunk, passes: Passes, kept: Place, deferred: Place, grads: Arrays, reduce: Reduce) -> Arrays:
    """Add the gradients of the weights to `grads`; `kept` is of what the weight pass reads alone."""

    def one(j, grads):
        dw = passes.weight(chunk.given(j), _take_chunk(chunk, kept, j), _take_chunk(chunk, deferred, j))
        return rings.add_to_slot(grads, chunk.first + j, reduce(dw))

    return _over_blocks(chunk, grads, one)


def _put_chunk(chunk: Chunk, place: Place, j: Any, values: Arrays) -> Arrays:
    each = zip(place.rings, place.slots, values, strict=True)
    return [rings.write_slot([ring], slot * chunk.num_blocks + j, [x])[0] for ring, slot, x in each]


def _take_chunk(chunk: Chunk, place: Place, j: Any) -> Arrays:
    each = zip(place.rings, place.slots, strict=True)
    return [rings.read_slot([ring], slot * chunk.num_blocks + j)[0] for ring, slot in each]


def _over_blocks(chunk: Chunk, carry: Any, one: Callable[[Any, Any], Any], *, reverse: bool = False) -> Any:
    body = lambda carry, j: (one(j, carry), None)  # noqa: E731
    return jax.lax.scan(body, carry, jnp.arange(chunk.num_blocks), reverse=reverse)[0]


class StageFns(NamedTuple):
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
    parts: StageFns
    weights: Arrays
    x: Arrays
    num_blocks: int
    virtual: Any

    def chunk(self, number: Any, m: Any) -> Chunk:
        """Return the blocks of a chunk of this stage, for micro-batch m."""
        first, block = number * self.num_blocks, self.virtual[number] * self.num_blocks

        def given(j):
            return [*rings.read_slot(self.weights, first + j), block + j, m]

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


def lay_out(schedule: Schedule, parts: StageFns, weights: Arrays) -> Stage:
    """Work out which blocks this stage runs."""
    return Stage(
        schedule=schedule,
        parts=parts,
        weights=weights,
        x=jax.eval_shape(parts.embed, jnp.int32(0)),
        num_blocks=weights[0].shape[0] // schedule.num_chunks,
        virtual=jnp.asarray(schedule.virtual_stages, jnp.int32)[jax.lax.axis_index(PIPELINE)],
    )


def prepare(schedule: Schedule, parts: StageFns, weights: Arrays, *, remat: bool, idle: float) -> Run:
    """Trace the block once with its gradients, and work out what is fixed."""
    stage, m = lay_out(schedule, parts, weights), jnp.int32(0)
    given = [*(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights), m, m]
    passes = split_backward(parts.block, given, stage.x, trained=parts.trained)
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
        inputs=rings.make_ring(x, schedule.num_input_slots, idle),
        activations=rings.make_ring(
            x if run.remat else run.passes.kept, schedule.num_slots * (1 if run.remat else k), idle
        ),
        outputs=rings.make_ring(x, 0 if run.remat or run.at_once else schedule.num_slots, idle),
        cotangents=rings.make_ring(run.dx, schedule.num_cotangent_slots, idle),
        deferred=rings.make_ring(deferred, schedule.num_deferred_slots * k, idle),
        arrived=[rings.blank_ring(x, idle) for _ in schedule.forward_shifts],
        returned=[rings.blank_ring(run.dx, idle) for _ in schedule.backward_shifts],
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
