"""What a stage of a pipeline runs: its blocks, chunk by chunk, with what each pass leaves for the next in ring buffers."""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.audit.walk import ONE_TURN
from shardopt.core.types import PyTree, wide_dtype
from shardopt.pipeline.cut import Counts, first_blocks, is_even
from shardopt.pipeline.messages import (
    PIPELINE,
    Index,
    add_to_slot,
    in_tiles,
    make_buffers,
    make_filled,
    read_slot,
    write_slot,
)
from shardopt.pipeline.schedule import Schedule
from shardopt.remat.split_backward import Arrays, Passes, floating, rematerialised, split_backward

C = TypeVar("C")


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

    embed: Callable[[Index], Arrays]
    embed_grads: Callable[[Index, Arrays], Arrays]
    loss: Callable[[Index, Arrays], PyTree]
    loss_grads: Callable[[Index, Arrays], tuple[Arrays, Arrays, PyTree]]
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


class Carry(NamedTuple):
    """What goes from tick to tick: ring buffers, messages that have arrived or are still to be sent, and the sums so far."""

    inputs: Arrays
    activations: Arrays
    outputs: Arrays
    cotangents: Arrays
    deferred: Arrays
    arrived: list[Arrays]
    returned: list[Arrays]
    leaving: Arrays
    leaving_back: Arrays
    sums: Sums


class Chunk(NamedTuple):
    """The blocks of one chunk of one micro-batch, for the tick at hand.

    Attributes:
      num_blocks: k, how many there is room for.
      size: how many there are; an array where chunks have unequally many.
      first: where the first of them lies in this stage's weights and gradients, [chunks * k, ...].
      micro_batch: m.
      given: `given(j)`: the weights and other arguments of block j of the chunk.
    """

    num_blocks: int
    size: Index
    first: Index
    micro_batch: jax.Array
    given: Callable[[Index], Arrays]


class Stage(NamedTuple):
    """The blocks of a stage; see `execute` for the first three.

    Attributes:
      schedule: the table.
      fns: the model.
      weights: of this stage's blocks, [chunks * k, ...].
      x: the shapes of what travels from block to block.
      num_blocks: k, the blocks of the largest chunk.
      first_blocks: [chunks], the number in the model of each chunk's first block.
      counts: [chunks], how many blocks each chunk has; None if all have k.
    """

    schedule: Schedule
    fns: StageFns
    weights: Arrays
    x: list[jax.ShapeDtypeStruct]
    num_blocks: int
    first_blocks: jax.Array
    counts: jax.Array | None

    def chunk(self, number: jax.Array, m: jax.Array) -> Chunk:
        """Return the blocks of a chunk of this stage, for micro-batch m."""
        first, block = number * self.num_blocks, self.first_blocks[number]
        count = self.num_blocks if self.counts is None else self.counts[number]
        return Chunk(
            self.num_blocks, count, first, m, lambda j: [*in_tiles(read_slot(self.weights, first + j)), block + j, m]
        )


class Setup(NamedTuple):
    """What stays the same from tick to tick while a pipeline is differentiated; see `execute` for `remat` and `idle`.

    Attributes:
      stage: its blocks.
      passes: the split passes of a block.
      remat: whether the backward pass runs the forward again.
      idle: what an idle pass hands on.
    """

    stage: Stage
    passes: Passes
    remat: bool
    idle: float

    @property
    def dx(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the floating leaves of x, which have gradients."""
        return [self.stage.x[i] for i in floating(self.stage.x)]

    @property
    def residuals_for_weight(self) -> tuple[int, ...]:
        """Which residuals of a forward lie with what the backward pass leaves for the weight pass.

        The activations lie in their slot until then, unless they are computed again for the backward pass.
        """
        return self.passes.weight_residuals if self.remat and self.stage.schedule.ticks.weight is not None else ()


def make_stage(schedule: Schedule, fns: StageFns, weights: Arrays, counts: Counts) -> Stage:
    """Work out which blocks this stage runs."""
    stage, virtual = jax.lax.axis_index(PIPELINE), np.asarray(schedule.virtual_stages)
    of_stage = lambda values: jnp.asarray(np.asarray(values, np.int32)[virtual])[stage]  # noqa: E731
    return Stage(
        schedule=schedule,
        fns=fns,
        weights=weights,
        x=jax.eval_shape(fns.embed, jnp.int32(0)),
        num_blocks=max(counts),
        first_blocks=of_stage(first_blocks(counts)),
        counts=None if is_even(counts) else of_stage(counts),
    )


def prepare(schedule: Schedule, fns: StageFns, weights: Arrays, counts: Counts, *, remat: bool, idle: float) -> Setup:
    """Work out which blocks this stage runs, and split the passes of a block."""
    stage, m = make_stage(schedule, fns, weights, counts), jnp.int32(0)
    given = [*(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights), m, m]
    passes = split_backward(fns.block, given, stage.x, trained=fns.trained)
    return Setup(stage, rematerialised(passes, stage.x) if fns.remat_blocks else passes, remat, idle)


def first_carry(setup: Setup) -> Carry:
    """Return the empty ring buffers and the zero sums of the first tick."""
    schedule, x, k, idle = setup.stage.schedule, setup.stage.x, setup.stage.num_blocks, setup.idle
    shapes, count = (x, schedule.num_slots) if setup.remat else (setup.passes.residuals, schedule.num_slots * k)
    at_once = schedule.ticks.forward[-1] == schedule.ticks.backward[-1]  # nothing waits for the loss
    ahead = schedule.ticks.message_ticks > 1
    deferred = [*setup.passes.deferred, *(setup.passes.residuals[i] for i in setup.residuals_for_weight)]
    return Carry(
        inputs=make_buffers(x, schedule.num_input_slots, idle),
        activations=make_buffers(shapes, count, idle),
        outputs=make_buffers(x, 0 if setup.remat or at_once else schedule.num_slots, idle),
        cotangents=make_buffers(setup.dx, schedule.num_cotangent_slots, idle),
        deferred=make_buffers(deferred, schedule.num_deferred_slots * k, idle),
        arrived=[make_filled(x, idle) for _ in schedule.forward_shifts],
        returned=[make_filled(setup.dx, idle) for _ in schedule.backward_shifts],
        leaving=make_filled(x, idle) if ahead else [],
        leaving_back=make_filled(setup.dx, idle) if ahead else [],
        sums=_zero_sums(setup.stage),
    )


def _zero_sums(stage: Stage) -> Sums:
    shape = lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype)  # noqa: E731
    dw = jax.eval_shape(stage.fns.reduce, [shape(stage.weights[i]) for i in stage.fns.trained])
    _, outer, parts = jax.eval_shape(stage.fns.loss_grads, jnp.int32(0), stage.x)
    return Sums(
        blocks=[jnp.zeros((stage.weights[0].shape[0], *one.shape), wide_dtype(one.dtype)) for one in dw],
        outer=[jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in outer],
        parts=jax.tree.map(lambda one: jnp.zeros((stage.schedule.num_micro_batches, *one.shape), one.dtype), parts),
    )


class Place(NamedTuple):
    """Where the blocks of a chunk leave something for a later pass.

    Attributes:
      buffers: ring buffers [slots * k, ...], whose slots have a place for each of the k blocks.
      slots: which slot, of each buffer.
    """

    buffers: Arrays
    slots: Sequence[Index]


def chunk_forward(
    chunk: Chunk, block: Callable[[Arrays, Arrays], Arrays], x: Arrays, *, differentiable: bool = False
) -> Arrays:
    """Run the blocks, keeping nothing; to be differentiated, it skips blocks that are not there rather than end its loop."""

    def one(j: Index, x: Arrays) -> Arrays:
        return block(chunk.given(j), x)

    def if_there(j: Index, x: Arrays) -> Arrays:
        return jax.lax.cond(j < chunk.size, one, lambda _, x: x, j, x)

    if not differentiable:
        return _over_blocks(chunk, x, one)
    run = one if isinstance(chunk.size, int) else if_there
    return jax.lax.scan(lambda x, j: (run(j, x), None), x, jnp.arange(chunk.num_blocks))[0]


def chunk_forward_keeping(chunk: Chunk, passes: Passes, x: Arrays, residuals: Place) -> tuple[Arrays, Arrays]:
    """Run the blocks, and store the residuals of each; return the output and the buffers."""

    def one(j: Index, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        x, buffers = carry
        y, left = passes.forward(chunk.given(j), x)
        return y, _write_block(chunk, residuals._replace(buffers=buffers), j, in_tiles(left))

    return _over_blocks(chunk, (x, residuals.buffers), one)


def chunk_backward(
    chunk: Chunk, passes: Passes, residuals: Place, dy: Arrays, grads: Arrays, reduce: Callable[[Arrays], Arrays]
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and add those of the weights, reduced, to `grads`."""

    def one(j: Index, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        dy, grads = carry
        dx, dw = passes.both(chunk.given(j), _read_block(chunk, residuals, j), dy)
        return dx, add_to_slot(grads, chunk.first + j, reduce(dw))

    return _over_blocks(chunk, (dy, grads), one, reverse=True)


def chunk_backward_deferring(
    chunk: Chunk, passes: Passes, residuals: Place, dy: Arrays, deferred: Place
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and store what the weight pass needs; return it and the buffers."""

    def one(j: Index, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        dy, buffers = carry
        dx, left = passes.backward(chunk.given(j), _read_block(chunk, residuals, j), dy)
        return dx, _write_block(chunk, deferred._replace(buffers=buffers), j, left)

    return _over_blocks(chunk, (dy, deferred.buffers), one, reverse=True)


def chunk_weight(
    chunk: Chunk, passes: Passes, residuals: Place, deferred: Place, grads: Arrays, reduce: Callable[[Arrays], Arrays]
) -> Arrays:
    """Add the gradients of the weights, reduced, to `grads`; `residuals` are those that the weight pass reads."""

    def one(j: Index, grads: Arrays) -> Arrays:
        dw = passes.weight(chunk.given(j), _read_block(chunk, residuals, j), _read_block(chunk, deferred, j))
        return add_to_slot(grads, chunk.first + j, reduce(dw))

    return _over_blocks(chunk, grads, one)


def _write_block(chunk: Chunk, place: Place, j: Index, values: Arrays) -> Arrays:
    each = zip(place.buffers, place.slots, values, strict=True)
    return [write_slot(buffer, slot * chunk.num_blocks + j, x) for buffer, slot, x in each]


def _read_block(chunk: Chunk, place: Place, j: Index) -> Arrays:
    each = zip(place.buffers, place.slots, strict=True)
    return [read_slot([buffer], slot * chunk.num_blocks + j)[0] for buffer, slot in each]


def _over_blocks(chunk: Chunk, carry: C, one: Callable[[Index, C], C], *, reverse: bool = False) -> C:
    count = chunk.size
    if isinstance(count, int) and count > 1:
        body = lambda carry, j: (one(j, carry), None)  # noqa: E731
        return jax.lax.scan(body, carry, jnp.arange(count), reverse=reverse)[0]
    # A loop that ends where the chunk does. XLA would dissolve one that it knows to turn once, and then copies whole ring
    # buffers into other layouts; that micro-batches are not negative it does not know, and the name tells readers.
    once = isinstance(count, int)
    end = jnp.minimum(chunk.micro_batch, 0) + 1 if once else count
    with jax.named_scope(ONE_TURN) if once else contextlib.nullcontext():
        return jax.lax.fori_loop(0, end, lambda i, carry: one(end - 1 - i if reverse else i, carry), carry)
