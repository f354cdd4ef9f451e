"""What moves from stage to stage over the mesh axis `pipeline`, and the ring buffers in which it waits.

Permutes stand outside of branches, since every stage takes part in each.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from shardopt.collectives import shard_by_shard
from shardopt.core.types import PyTree
from shardopt.pipeline.schedule import Schedule
from shardopt.remat.split_backward import Arrays

PIPELINE = "pipeline"

Index = jax.Array | int
"""A number of a slot, block, chunk or micro-batch, an int32 scalar that may be traced."""


def send(schedule: Schedule, kind: str, leaves: Arrays, made_before: Arrays) -> list[Arrays]:
    """Send what a stage made, by every shift of `forward_shifts` or `backward_shifts`.

    A stage from which nobody needs it by that shift sends nothing, and one to which nobody sends gets zeros.

    Args:
      schedule: the table.
      kind: "forward" or "backward".
      leaves: what it made on this tick.
      made_before: what it made on the tick before, which travels now if messages are sent ahead.
    """
    stage = np.asarray(schedule.ticks.stage_of)
    sources, targets = (stage[:-1], stage[1:]) if kind == "forward" else (stage[1:], stage[:-1])
    shifts = schedule.forward_shifts if kind == "forward" else schedule.backward_shifts
    used = set(zip(sources.tolist(), targets.tolist(), strict=True))
    travels = leaves if schedule.ticks.message_ticks == 1 else made_before
    sent = []
    for shift in shifts:
        pairs = sorted((s, t) for s, t in used if (t - s) % schedule.num_stages == shift)
        sent.append(permute(travels, pairs) if shift else list(leaves))
    return sent


def permute(
    leaves: Sequence[jax.Array], pairs: Sequence[tuple[int, int]], specs: Sequence[PartitionSpec] | None = None
) -> Arrays:
    """Send each leaf from stage to stage, as (source, target) pairs; `specs` say how leaves lie over tensor."""
    specs = [PartitionSpec()] * len(leaves) if specs is None else specs
    move = lambda xs: [jax.lax.ppermute(x, PIPELINE, list(pairs)) for x in xs]  # noqa: E731
    return shard_by_shard(move, list(leaves), specs)


def store_message(buffers: Arrays, arrived: Sequence[Arrays], slots: jax.Array) -> Arrays:
    """Write each message that has to wait into its slot, [len(arrived)]; -1 is none."""
    if not buffers:
        return buffers
    for message, slot in zip(arrived, slots, strict=True):
        buffers = jax.lax.cond(slot >= 0, write_slot, lambda buffers, *_: buffers, buffers, slot, message)
    return buffers


def read_message(
    source: jax.Array, at_end: Callable[[], Arrays] | None, arrived: list[Arrays], buffers: Arrays, slot: jax.Array
) -> Arrays:
    """Return what a pass works on: `at_end()` (source 0), a message just arrived (1, 2, ...), or one that waited.

    The source is as `message_sources` numbers it; `at_end` is None where this is known to be no end of the model.
    """
    branches = [at_end] if at_end is not None else []
    branches += [lambda message=message: message for message in arrived]
    branches += [lambda: read_slot(buffers, slot)] if buffers else []
    return jax.lax.switch(source - (at_end is None), branches)


def message_sources(table: dict[str, np.ndarray], kind: str, num_shifts: int) -> np.ndarray:
    """Number the sources of a pass [num_ticks, S] for `read_message`: 0 the end of the model, then shifts, then waiting."""
    waited = table[f"{kind}_waited"] >= 0
    return np.where(waited, num_shifts + 1, table[f"{kind}_shift"] + 1).astype(np.int32)


# Ring buffers are lists of arrays [num_slots, ...], read and written one slot at a time; empty where nothing is kept.


def make_buffers(shapes: Sequence[jax.ShapeDtypeStruct], num_slots: int, fill: float) -> Arrays:
    """Return ring buffers for arrays of these shapes; of no slots, none."""
    return make_filled(shapes, fill, num_slots) if num_slots else []


def make_filled(shapes: Sequence[jax.ShapeDtypeStruct], fill: float, *stack: int) -> Arrays:
    """Return arrays [*stack, ...] of `fill`, or of zeros where the dtype is not floating."""
    number = lambda dtype: fill if jnp.issubdtype(dtype, jnp.inexact) else 0  # noqa: E731
    return [jnp.full((*stack, *one.shape), number(one.dtype), one.dtype) for one in shapes]


def write_slot(buffers: PyTree, slot: Index, values: PyTree) -> PyTree:
    """Return the buffers with `values` in a slot; pytrees of one structure."""
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_index_in_dim(old, x, slot, 0), buffers, values)


def in_tiles(leaves: Arrays) -> Arrays:
    """Return the same; on a TPU, with the two longest dims last in memory where they fill its tiles, 8 x 128 numbers.

    Of what several branches share, ring buffers and weights, XLA:TPU takes the layout that suits one of them, and the
    others copy on every tick. This one suits all: a product reads and writes it at no cost.
    """
    orders = [_tiled(leaf.shape) for leaf in leaves]

    def one(x: jax.Array, order: tuple[int, ...] | None) -> jax.Array:
        return x if order is None else with_layout_constraint(x, Layout(order))

    def on_tpu(leaves: Arrays) -> Arrays:
        return [one(x, order) for x, order in zip(leaves, orders, strict=True)]

    return jax.lax.platform_dependent(leaves, tpu=on_tpu, default=lambda leaves: leaves) if any(orders) else leaves


def _tiled(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dims in the order of memory; None where tiles would not be full."""
    longest = sorted(sorted(range(len(shape)), key=lambda dim: (-shape[dim], -dim))[:2])
    if len(shape) < 2 or shape[longest[0]] % 8 or shape[longest[1]] % 128:
        return None
    rest = [dim for dim in range(len(shape)) if dim not in longest]
    return (*rest, *longest)


def read_slot(buffers: Arrays, slot: Index) -> Arrays:
    """Return what lies in a slot."""
    return [jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in buffers]


def add_to_slot(buffers: Arrays, slot: Index, values: Sequence[jax.Array]) -> Arrays:
    """Return the buffers with `values` added to a slot, in the dtype of the buffers.

    What is read has the shape of what is written: XLA then adds in place, and would copy the slot first otherwise.
    """
    slots = [jax.lax.dynamic_slice_in_dim(x, slot, 1) for x in buffers]
    sums = add(slots, [x[None] for x in values])
    return [jax.lax.dynamic_update_slice_in_dim(x, y, slot, 0) for x, y in zip(buffers, sums, strict=True)]


def add(sums: Arrays, values: Sequence[jax.Array]) -> Arrays:
    """Return the sums with `values` added, in the dtype of the sums."""
    return [total + value.astype(total.dtype) for total, value in zip(sums, values, strict=True)]


# Blocks are stored in the model's order, and run in the schedule's.

Move = tuple[int, int, int, int]
"""(stage it is stored on, place there, stage it runs on, place there) of one virtual stage."""


def to_schedule(schedule: Schedule, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> Arrays:
    """Bring each stage the blocks that it runs; the identity where a stage has one chunk, in order.

    Leaves are [L / S, ...], and `specs` say how they lie over tensor. A stage stores L / S blocks that follow each
    other in the model; with several chunks it runs others. One permute per chunk moves them, once per step.
    """
    return _exchange(schedule, leaves, specs, [(a, i, b, j) for a, i, b, j in _moves(schedule)])


def to_model(schedule: Schedule, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> Arrays:
    """Bring blocks, or their gradients, back to where they are stored: the inverse of `to_schedule`."""
    return _exchange(schedule, leaves, specs, [(b, j, a, i) for a, i, b, j in _moves(schedule)])


def _moves(schedule: Schedule) -> list[Move]:
    chunks, ticks = schedule.num_chunks, schedule.ticks
    places = zip(ticks.stage_of, ticks.chunk_of, strict=True)
    return [(v // chunks, v % chunks, stage, chunk) for v, (stage, chunk) in enumerate(places)]


def rounds_to_schedule(schedule: Schedule) -> int:
    """Return in how many rounds `to_schedule` sends a chunk to another stage; so many bring gradients back as well."""
    return sum(any(a != b for a, _, b, _ in one) for one in _rounds(schedule.num_stages, _moves(schedule)))


def _exchange(
    schedule: Schedule, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec], moves: list[Move]
) -> Arrays:
    if all((a, i) == (b, j) for a, i, b, j in moves):
        return list(leaves)
    chunks, stage = schedule.num_chunks, jax.lax.axis_index(PIPELINE)
    old = [x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]) for x in leaves]
    new = [jnp.zeros_like(x) for x in old]
    for one in _rounds(schedule.num_stages, moves):
        leaving = jnp.asarray([place for _, place, _, _ in sorted(one)])[stage]
        coming = jnp.asarray([place for _, place in sorted((b, j) for _, _, b, j in one)])[stage]
        sent = permute(read_slot(old, leaving), [(a, b) for a, _, b, _ in one], specs)
        new = write_slot(new, coming, sent)
    return [x.reshape(leaf.shape) for x, leaf in zip(new, leaves, strict=True)]


def _rounds(num_stages: int, moves: list[Move]) -> list[list[Move]]:
    """Cut the moves into rounds in which every stage sends one chunk and receives one.

    Each stage is the source of as many moves as it is the target of, so there is such a round (a perfect matching),
    and what is left after it is of the same kind: König's theorem on regular bipartite graphs.
    """
    left, rounds = list(moves), []
    while left:
        one = _matching(num_stages, left)
        rounds.append(one)
        left = [move for move in left if move not in one]
    return rounds


def _matching(num_stages: int, moves: list[Move]) -> list[Move]:
    into: dict[int, Move] = {}

    def place(stage: int, tried: set[int]) -> bool:
        for move in moves:
            target = move[2]
            if move[0] == stage and target not in tried:
                tried.add(target)
                if target not in into or place(into[target][0], tried):
                    into[target] = move
                    return True
        return False

    found = [place(stage, set()) for stage in range(num_stages)]
    assert all(found)
    return list(into.values())
