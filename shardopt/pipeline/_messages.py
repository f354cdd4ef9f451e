"""Messages between stages over the mesh axis `pipeline`, and the ring buffers that hold waiting
messages.

Permutes are outside of branches, since every stage takes part in each permute.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from shardopt.collectives import shard_by_shard
from shardopt.core import Arrays, PyTree
from shardopt.pipeline._schedule import Schedule

PIPELINE = "pipeline"

Index = jax.Array | int
"""The number of a slot, block, chunk or micro-batch: an int32 scalar, which may be traced."""


def send(schedule: Schedule, kind: str, leaves: Arrays, previous_leaves: Arrays) -> list[Arrays]:
    """Send the output of a stage by every shift of `forward_shifts` or `backward_shifts`.

    A stage sends nothing by a shift if no stage needs the message; a stage without a sender gets
    zeros.

    Args:
      schedule: the table.
      kind: "forward" or "backward".
      leaves: the output of this tick.
      previous_leaves: the output of the previous tick, which is sent instead if messages are sent
        ahead.
    """
    stage = np.asarray(schedule.ticks.stage_of)
    sources, targets = (stage[:-1], stage[1:]) if kind == "forward" else (stage[1:], stage[:-1])
    shifts = schedule.forward_shifts if kind == "forward" else schedule.backward_shifts
    stage_pairs = set(zip(sources.tolist(), targets.tolist(), strict=True))
    outgoing = leaves if schedule.ticks.message_ticks == 1 else previous_leaves
    messages = []
    for shift in shifts:
        pairs = sorted((s, t) for s, t in stage_pairs if (t - s) % schedule.num_stages == shift)
        # A message that stays on its stage is used on the next tick, also if others are sent ahead.
        # So it is of this tick, and no permute is needed.
        messages.append(permute(outgoing, pairs) if shift else list(leaves))
    return messages


def permute(
    leaves: Sequence[jax.Array],
    pairs: Sequence[tuple[int, int]],
    specs: Sequence[PartitionSpec] | None = None,
) -> Arrays:
    """Send each leaf from stage to stage by (source, target) pairs.

    `specs` say how leaves are sharded over tensor.
    """
    specs = [PartitionSpec()] * len(leaves) if specs is None else specs

    def send_all(xs):
        return [jax.lax.ppermute(x, PIPELINE, list(pairs)) for x in xs]

    return shard_by_shard(send_all, list(leaves), specs)


def store_message(buffers: Arrays, arrived: Sequence[Arrays], slots: jax.Array) -> Arrays:
    """Write each message that has to wait into its slot, [len(arrived)].

    Slot -1 means that the message does not wait.
    """
    if not buffers:
        return buffers
    for message, slot in zip(arrived, slots, strict=True):
        buffers = jax.lax.cond(
            slot >= 0, write_slot, lambda buffers, *_: buffers, buffers, slot, message
        )
    return buffers


def read_message(
    source: jax.Array,
    at_end: Callable[[], Arrays] | None,
    arrived: list[Arrays],
    buffers: Arrays,
    slot: jax.Array,
) -> Arrays:
    """Return the input of a pass: `at_end()` (source 0), a message that has just arrived (1, 2,
    ...), or a message that waited.

    `message_sources` numbers the sources. `at_end` is None if the pass is never at an end of the
    model.
    """
    branches = [at_end] if at_end is not None else []
    branches += [lambda message=message: message for message in arrived]
    branches += [lambda: read_slot(buffers, slot)] if buffers else []
    # Source 0 is the end of the model. Without that branch all others move up by one.
    return jax.lax.switch(source - (at_end is None), branches)


def message_sources(table: dict[str, np.ndarray], kind: str, num_shifts: int) -> np.ndarray:
    """Number the sources of a pass [num_ticks, S] for `read_message`: 0 the end of the model, then
    shifts, then waiting messages.
    """
    waited = table[f"{kind}_waited"] >= 0
    return np.where(waited, num_shifts + 1, table[f"{kind}_shift"] + 1).astype(np.int32)


# Ring buffers are lists of arrays [num_slots, ...], read and written one slot at a time; the list
# is empty if nothing is stored.


def make_buffers(shapes: Sequence[jax.ShapeDtypeStruct], num_slots: int, fill: float) -> Arrays:
    """Return ring buffers for arrays of these shapes; an empty list for zero slots."""
    return make_filled(shapes, fill, num_slots) if num_slots else []


def make_filled(shapes: Sequence[jax.ShapeDtypeStruct], fill: float, *stack: int) -> Arrays:
    """Return arrays [*stack, ...] of `fill`; arrays with a dtype that is not floating are zeros."""

    def fill_value(dtype):
        return fill if jnp.issubdtype(dtype, jnp.inexact) else 0

    return [jnp.full((*stack, *leaf.shape), fill_value(leaf.dtype), leaf.dtype) for leaf in shapes]


def write_slot(buffers: PyTree, slot: Index, values: PyTree) -> PyTree:
    """Return the buffers with `values` in a slot; both are pytrees of the same structure."""
    return jax.tree.map(
        lambda old, x: jax.lax.dynamic_update_index_in_dim(old, x, slot, 0), buffers, values
    )


def in_tiles(leaves: Arrays) -> Arrays:
    """Return the same leaves.

    On a TPU, constrain the two longest dims to be last in memory if they fill tiles of 8 x 128
    numbers.

    If several branches share an array, such as a ring buffer or a weight, XLA:TPU picks the layout
    that suits one branch. The other branches then copy the array on every tick. This layout suits
    all: a product reads and writes it at no cost.
    """
    layouts = [_tiled_layout(leaf.shape) for leaf in leaves]

    def constrain(x: jax.Array, layout: tuple[int, ...] | None) -> jax.Array:
        return x if layout is None else with_layout_constraint(x, Layout(layout))

    def on_tpu(leaves: Arrays) -> Arrays:
        return [constrain(x, layout) for x, layout in zip(leaves, layouts, strict=True)]

    return (
        jax.lax.platform_dependent(leaves, tpu=on_tpu, default=lambda leaves: leaves)
        if any(layouts)
        else leaves
    )


def _tiled_layout(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dims in the order of memory, or None if tiles would not be full."""
    longest = sorted(sorted(range(len(shape)), key=lambda dim: (-shape[dim], -dim))[:2])
    if len(shape) < 2 or shape[longest[0]] % 8 or shape[longest[1]] % 128:
        return None
    other_dims = [dim for dim in range(len(shape)) if dim not in longest]
    return (*other_dims, *longest)


def read_slot(buffers: Arrays, slot: Index) -> Arrays:
    """Return the arrays in a slot."""
    return [jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in buffers]


def add_to_slot(buffers: Arrays, slot: Index, values: Sequence[jax.Array]) -> Arrays:
    """Return the buffers with `values` added to a slot, in the dtype of the buffers.

    The slice that is read has the shape of the slice that is written, so XLA adds in place.
    Otherwise it would copy the slot.
    """
    slices = [jax.lax.dynamic_slice_in_dim(x, slot, 1) for x in buffers]
    sums = add(slices, [x[None] for x in values])
    return [
        jax.lax.dynamic_update_slice_in_dim(x, y, slot, 0)
        for x, y in zip(buffers, sums, strict=True)
    ]


def add(sums: Arrays, values: Sequence[jax.Array]) -> Arrays:
    """Return the sums with `values` added, in the dtype of the sums."""
    return [total + value.astype(total.dtype) for total, value in zip(sums, values, strict=True)]


# Blocks are stored in the order of the model, and run in the order of the schedule.

Move = tuple[int, int, int, int]
"""(storing stage, chunk on that stage, running stage, chunk on that stage) of one virtual stage."""


def to_schedule(
    schedule: Schedule, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> Arrays:
    """Bring to each stage the blocks that it runs.

    The identity if each stage has one chunk, in order.

    Leaves are [L / S, ...], and `specs` say how they are sharded over tensor. A stage stores L / S
    consecutive blocks of the model; with several chunks it runs other blocks. One permute per chunk
    moves them, once per step.
    """
    return _exchange(
        schedule,
        leaves,
        specs,
        [(source, old, target, new) for source, old, target, new in _moves(schedule)],
    )


def to_model(
    schedule: Schedule, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> Arrays:
    """Bring blocks, or their gradients, back to the stage that stores them: the inverse of
    `to_schedule`.
    """
    return _exchange(
        schedule,
        leaves,
        specs,
        [(target, new, source, old) for source, old, target, new in _moves(schedule)],
    )


# Two stages with two chunks each; v is a virtual stage:
#
#               stage 0   stage 1
# stored        v0 v1     v2 v3      in the order of the model
# interleaved   v0 v2     v1 v3
# on a V        v0 v3     v1 v2
def _moves(schedule: Schedule) -> list[Move]:
    chunks = schedule.num_chunks
    ticks = schedule.ticks
    places = zip(ticks.stage_of, ticks.chunk_of, strict=True)
    return [(v // chunks, v % chunks, stage, chunk) for v, (stage, chunk) in enumerate(places)]


def rounds_to_schedule(schedule: Schedule) -> int:
    """Return in how many rounds `to_schedule` sends a chunk to another stage.

    Gradients return in as many rounds.
    """
    return sum(
        any(source != target for source, _, target, _ in moves_of_round)
        for moves_of_round in _rounds(schedule.num_stages, _moves(schedule))
    )


def _exchange(
    schedule: Schedule,
    leaves: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    moves: list[Move],
) -> Arrays:
    if all((source, old) == (target, new) for source, old, target, new in moves):
        return list(leaves)
    chunks = schedule.num_chunks
    stage = jax.lax.axis_index(PIPELINE)
    stored = [x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]) for x in leaves]
    # every chunk is overwritten; zeros would be kept until gradients return, and are as large as
    # the blocks
    rearranged = list(stored)
    for moves_of_round in _rounds(schedule.num_stages, moves):
        # Sorted by source, and each stage is a source once a round: entry s is of stage s.
        sent_chunk = jnp.asarray([old for _, old, _, _ in sorted(moves_of_round)])[stage]
        arrivals = sorted((target, new) for _, _, target, new in moves_of_round)
        received_chunk = jnp.asarray([new for _, new in arrivals])[stage]
        pairs = [(source, target) for source, _, target, _ in moves_of_round]
        received = permute(read_slot(stored, sent_chunk), pairs, specs)
        rearranged = write_slot(rearranged, received_chunk, received)
    return [x.reshape(leaf.shape) for x, leaf in zip(rearranged, leaves, strict=True)]


def _rounds(num_stages: int, moves: list[Move]) -> list[list[Move]]:
    """Cut the moves into rounds: every stage sends one chunk and receives one in a round.

    Each stage is the source and the target of equally many moves, so such a round (a perfect
    matching) exists. The remaining moves have the same property: König's theorem on regular
    bipartite graphs.
    """
    remaining = list(moves)
    rounds = []
    while remaining:
        matching = _matching(num_stages, remaining)
        rounds.append(matching)
        remaining = [move for move in remaining if move not in matching]
    return rounds


def _matching(num_stages: int, moves: list[Move]) -> list[Move]:
    move_into: dict[int, Move] = {}

    def find_target(stage: int, tried: set[int]) -> bool:
        for move in moves:
            target = move[2]
            if move[0] == stage and target not in tried:
                tried.add(target)
                # Kuhn's algorithm: a taken target is freed if its source finds another one.
                if target not in move_into or find_target(move_into[target][0], tried):
                    move_into[target] = move
                    return True
        return False

    matched = [find_target(stage, set()) for stage in range(num_stages)]
    assert all(matched)
    return list(move_into.values())
