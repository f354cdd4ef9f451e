"""The program of one pipeline stage: it runs its blocks chunk by chunk, and stores in ring buffers
what later passes need.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import Arrays, PyTree, inexact_indices, wide_dtype, wide_zeros
from shardopt.partition._counts import Counts, is_even
from shardopt.pipeline._cut import first_blocks
from shardopt.pipeline._messages import (
    PIPELINE,
    Index,
    add_to_slot,
    in_tiles,
    make_buffers,
    make_filled,
    read_slot,
    write_slot,
)
from shardopt.pipeline._schedule import Schedule
from shardopt.remat._split_backward import Passes, rematerialised, split_backward

C = TypeVar("C")


class StageFns(Protocol):
    """A model as functions of local arrays and of m, the number of a micro-batch.

    All use lists of arrays.
    """

    @property
    def trained(self) -> Sequence[int]:
        """The indices of the weights of a block that have gradients."""
        ...

    @property
    def remat_blocks(self) -> bool:
        """Whether a block stores only its input, and runs its forward again in its backward pass."""
        ...

    def embed(self, m: Index) -> Arrays:
        """Return x, the input of the first block."""
        ...

    def embed_grads(self, m: Index, dx: Arrays) -> Arrays:
        """Return the gradients of the outer weights."""
        ...

    def loss(self, m: Index, x: Arrays) -> PyTree:
        """Return the parts of the loss, a pytree of numbers."""
        ...

    def loss_grads(self, m: Index, x: Arrays) -> tuple[Arrays, Arrays, PyTree]:
        """Return (dx, grads, parts), with the gradients of the outer weights."""
        ...

    def block(self, block_args: Arrays, x: Arrays) -> Arrays:
        """Return y; block_args = [*weights of the block, number of the block in the model, m]."""
        ...

    def reduce(self, dw: Arrays) -> Arrays:
        """Return the gradients that are summed over micro-batches, from the weight gradients of a
        block.
        """
        ...


class Sums(NamedTuple):
    """The sums over micro-batches on one stage: of its own blocks, and of the ends of the model if
    it holds them.

    Attributes:
      blocks: gradients [chunks * k, ...] of the trained weights, in fp32 at least.
      outer: gradients of the outer weights, in fp32 at least; zeros on stages that hold no end of
        the model.
      parts: the results of `loss`, stacked [M, ...]; zeros except on the stage of the last block.
    """

    blocks: Arrays
    outer: Arrays
    parts: PyTree


class Carry(NamedTuple):
    """The state that a stage carries from tick to tick.

    Attributes:
      inputs: ring buffers of forward messages that wait.
      activations: ring buffers of residuals, or with `remat` of chunk inputs.
      outputs: ring buffers of the last chunk's outputs, until their loss is computed.
      cotangents: ring buffers of backward messages that wait.
      deferred: ring buffers of what backward passes store for weight passes.
      arrived_activations: the forward messages that have just arrived, one for each of
        `forward_shifts`.
      arrived_cotangents: the backward messages that have just arrived, one for each of
        `backward_shifts`.
      outgoing_activations: the output of the last tick, if messages are sent ahead; else empty.
      outgoing_cotangents: the input gradient of the last tick, if messages are sent ahead; else
        empty.
      sums: the sums so far.
    """

    inputs: Arrays
    activations: Arrays
    outputs: Arrays
    cotangents: Arrays
    deferred: Arrays
    arrived_activations: list[Arrays]
    arrived_cotangents: list[Arrays]
    outgoing_activations: Arrays
    outgoing_cotangents: Arrays
    sums: Sums


class Chunk(NamedTuple):
    """The blocks of one chunk of one micro-batch, for the current tick.

    Attributes:
      num_blocks: k, the blocks of the largest chunk.
      size: how many blocks this chunk has; an array if the chunks differ.
      first: the index of its first block in this stage's weights and gradients, [chunks * k, ...].
      micro_batch: m.
      block_args: `block_args(j)` returns the weights and other arguments of block j of the chunk.
    """

    num_blocks: int
    size: Index
    first: Index
    micro_batch: jax.Array
    block_args: Callable[[Index], Arrays]


class Stage(NamedTuple):
    """The blocks of a stage; see `execute` for the first three fields.

    Attributes:
      schedule: the table.
      fns: the model.
      weights: the weights of this stage's blocks, [chunks * k, ...].
      x: the shapes of the arrays that go from block to block.
      num_blocks: k, the blocks of the largest chunk.
      first_blocks: [chunks], the model's number of each chunk's first block.
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
        first = number * self.num_blocks
        first_number = self.first_blocks[number]
        count = self.num_blocks if self.counts is None else self.counts[number]
        return Chunk(
            self.num_blocks,
            count,
            first,
            m,
            lambda j: [*in_tiles(read_slot(self.weights, first + j)), first_number + j, m],
        )


class Setup(NamedTuple):
    """The values that do not change from tick to tick; see `execute` for `remat` and `idle`.

    Attributes:
      stage: the blocks of this stage.
      passes: the split passes of a block.
      remat: whether the backward pass runs the forward again.
      idle: the output of an idle pass.
    """

    stage: Stage
    passes: Passes
    remat: bool
    idle: float

    @property
    def dx(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the floating leaves of x, which have gradients."""
        return [self.stage.x[i] for i in inexact_indices(self.stage.x)]

    @property
    def residuals_for_weight(self) -> tuple[int, ...]:
        """The indices of the residuals that the weight pass reads from the deferred buffers.

        Without `remat` there are none: activations stay in their slot until the weight pass.
        """
        return (
            self.passes.weight_residuals
            if self.remat and self.stage.schedule.ticks.weight is not None
            else ()
        )


def make_stage(schedule: Schedule, fns: StageFns, weights: Arrays, counts: Counts) -> Stage:
    """Return this stage's blocks as a `Stage`."""
    stage = jax.lax.axis_index(PIPELINE)
    virtual_stages = np.asarray(schedule.virtual_stages)

    def select_own(values):
        return jnp.asarray(np.asarray(values, np.int32)[virtual_stages])[stage]

    return Stage(
        schedule=schedule,
        fns=fns,
        weights=weights,
        x=jax.eval_shape(fns.embed, jnp.int32(0)),
        num_blocks=max(counts),
        first_blocks=select_own(first_blocks(counts)),
        counts=None if is_even(counts) else select_own(counts),
    )


def block_arguments(weights: Arrays) -> list[jax.ShapeDtypeStruct | jax.Array]:
    """Return the arguments of a block without x: the shapes of its weights, whose stacks are
    `weights`, its number in the model, and that of the micro-batch.
    """
    number = jnp.int32(0)
    one_block = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in weights]
    return [*one_block, number, number]


def make_setup(
    schedule: Schedule, fns: StageFns, weights: Arrays, counts: Counts, *, remat: bool, idle: float
) -> Setup:
    """Return this stage's blocks and the split passes of a block."""
    stage = make_stage(schedule, fns, weights, counts)
    # Split once, for a block: all blocks, chunks and micro-batches run the same program.
    passes = split_backward(fns.block, block_arguments(weights), stage.x, trained=fns.trained)
    return Setup(
        stage, rematerialised(passes, stage.x) if fns.remat_blocks else passes, remat, idle
    )


def initial_carry(setup: Setup) -> Carry:
    """Return the carry before the first tick: empty ring buffers and zero sums."""
    schedule = setup.stage.schedule
    x = setup.stage.x
    k = setup.stage.num_blocks
    idle = setup.idle
    # With `remat` a slot is the input of a chunk. Without it a slot has k places, one for each
    # block.
    shapes, num_places = (
        (x, schedule.num_slots) if setup.remat else (setup.passes.residuals, schedule.num_slots * k)
    )
    # so no output waits for its loss
    loss_at_once = schedule.ticks.forward[-1] == schedule.ticks.backward[-1]
    sends_ahead = schedule.ticks.message_ticks > 1
    deferred = [
        *setup.passes.deferred,
        *(setup.passes.residuals[i] for i in setup.residuals_for_weight),
    ]
    return Carry(
        inputs=make_buffers(x, schedule.num_input_slots, idle),
        activations=make_buffers(shapes, num_places, idle),
        outputs=make_buffers(x, 0 if setup.remat or loss_at_once else schedule.num_slots, idle),
        cotangents=make_buffers(setup.dx, schedule.num_cotangent_slots, idle),
        deferred=make_buffers(deferred, schedule.num_deferred_slots * k, idle),
        arrived_activations=[make_filled(x, idle) for _ in schedule.forward_shifts],
        arrived_cotangents=[make_filled(setup.dx, idle) for _ in schedule.backward_shifts],
        outgoing_activations=make_filled(x, idle) if sends_ahead else [],
        outgoing_cotangents=make_filled(setup.dx, idle) if sends_ahead else [],
        sums=_zero_sums(setup.stage),
    )


def _zero_sums(stage: Stage) -> Sums:
    def block_shape(w):
        return jax.ShapeDtypeStruct(w.shape[1:], w.dtype)

    # `reduce` may scatter over data: then the sums are shards, of 1/N the memory.
    dw = jax.eval_shape(
        stage.fns.reduce, [block_shape(stage.weights[i]) for i in stage.fns.trained]
    )
    _, outer, parts = jax.eval_shape(stage.fns.loss_grads, jnp.int32(0), stage.x)
    return Sums(
        blocks=[
            jnp.zeros((stage.weights[0].shape[0], *leaf.shape), wide_dtype(leaf.dtype))
            for leaf in dw
        ],
        outer=wide_zeros(outer),
        parts=jax.tree.map(
            lambda leaf: jnp.zeros((stage.schedule.num_micro_batches, *leaf.shape), leaf.dtype),
            parts,
        ),
    )


class BufferSlots(NamedTuple):
    """The slots that hold values of a chunk's blocks for a later pass.

    Attributes:
      buffers: ring buffers [slots * k, ...]; each slot has a place for each of the k blocks.
      slots: the slot in each buffer.
    """

    buffers: Arrays
    slots: Sequence[Index]


def chunk_forward(
    chunk: Chunk,
    block: Callable[[Arrays, Arrays], Arrays],
    x: Arrays,
    *,
    differentiable: bool = False,
) -> Arrays:
    """Run the blocks and store nothing.

    A differentiable program cannot end its loop early, so it skips the blocks that the chunk does
    not have.
    """

    def run_block(j: Index, x: Arrays) -> Arrays:
        return block(chunk.block_args(j), x)

    def run_or_skip_block(j: Index, x: Arrays) -> Arrays:
        return jax.lax.cond(j < chunk.size, run_block, lambda _, x: x, j, x)

    if not differentiable:
        return _loop_over_blocks(chunk, x, run_block)
    # A scan has a fixed length. Its turns beyond the chunk's size do nothing.
    step = run_block if isinstance(chunk.size, int) else run_or_skip_block
    return jax.lax.scan(lambda x, j: (step(j, x), None), x, jnp.arange(chunk.num_blocks))[0]


def chunk_forward_keeping(
    chunk: Chunk, passes: Passes, x: Arrays, residuals: BufferSlots
) -> tuple[Arrays, Arrays]:
    """Run the blocks and store the residuals of each; return the output and the buffers."""

    def run_block(j: Index, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        x, buffers = carry
        y, block_residuals = passes.forward(chunk.block_args(j), x)
        return y, _write_block(
            chunk, residuals._replace(buffers=buffers), j, in_tiles(block_residuals)
        )

    return _loop_over_blocks(chunk, (x, residuals.buffers), run_block)


def chunk_backward(
    chunk: Chunk,
    passes: Passes,
    residuals: BufferSlots,
    dy: Arrays,
    grads: Arrays,
    reduce: Callable[[Arrays], Arrays],
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and add the reduced gradients of the weights to `grads`.

    Return both.
    """

    def run_block(j: Index, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        dy, grads = carry
        # Invariant: dy is the gradient of the output of block j. Blocks run from the last to the
        # first.
        dx, dw = passes.both(chunk.block_args(j), _read_block(chunk, residuals, j), dy)
        return dx, add_to_slot(grads, chunk.first + j, reduce(dw))

    return _loop_over_blocks(chunk, (dy, grads), run_block, reverse=True)


def chunk_backward_deferring(
    chunk: Chunk, passes: Passes, residuals: BufferSlots, dy: Arrays, deferred: BufferSlots
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and store the inputs of the weight pass.

    Return the gradient and the buffers.
    """

    def run_block(j: Index, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        dy, buffers = carry
        dx, for_weight = passes.backward(chunk.block_args(j), _read_block(chunk, residuals, j), dy)
        return dx, _write_block(chunk, deferred._replace(buffers=buffers), j, for_weight)

    return _loop_over_blocks(chunk, (dy, deferred.buffers), run_block, reverse=True)


def chunk_weight(
    chunk: Chunk,
    passes: Passes,
    residuals: BufferSlots,
    deferred: BufferSlots,
    grads: Arrays,
    reduce: Callable[[Arrays], Arrays],
) -> Arrays:
    """Add the reduced gradients of the weights to `grads`.

    `residuals` are the ones that the weight pass reads.
    """

    def run_block(j: Index, grads: Arrays) -> Arrays:
        dw = passes.weight(
            chunk.block_args(j), _read_block(chunk, residuals, j), _read_block(chunk, deferred, j)
        )
        # No order is needed: weight gradients of blocks do not depend on each other.
        return add_to_slot(grads, chunk.first + j, reduce(dw))

    return _loop_over_blocks(chunk, grads, run_block)


def _write_block(chunk: Chunk, slots: BufferSlots, j: Index, values: Arrays) -> Arrays:
    triples = zip(slots.buffers, slots.slots, values, strict=True)
    return [write_slot(buffer, slot * chunk.num_blocks + j, x) for buffer, slot, x in triples]


def _read_block(chunk: Chunk, slots: BufferSlots, j: Index) -> Arrays:
    pairs = zip(slots.buffers, slots.slots, strict=True)
    return [read_slot([buffer], slot * chunk.num_blocks + j)[0] for buffer, slot in pairs]


def _loop_over_blocks(
    chunk: Chunk, carry: C, run_block: Callable[[Index, C], C], *, reverse: bool = False
) -> C:
    size = chunk.size
    if isinstance(size, int) and size > 1:

        def scan_step(carry, j):
            return (run_block(j, carry), None)

        return jax.lax.scan(scan_step, carry, jnp.arange(size), reverse=reverse)[0]
    # The loop ends with the chunk. If XLA knew that a loop turns once, it would dissolve the loop
    # and copy whole ring buffers into other layouts. XLA does not know that m >= 0, so it cannot
    # tell that `end` is 1. Tools that read the program can tell that it is no more (`trip_count`).
    end = jnp.minimum(chunk.micro_batch, 0) + 1 if isinstance(size, int) else size
    return jax.lax.fori_loop(
        0, end, lambda i, carry: run_block(end - 1 - i if reverse else i, carry), carry
    )
