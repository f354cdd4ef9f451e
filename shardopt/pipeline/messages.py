"""What goes from stage to stage: permutes over the mesh axis `pipeline`, always outside of branches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.collectives import shard_by_shard
from shardopt.pipeline import rings
from shardopt.pipeline.rings import Arrays
from shardopt.pipeline.schedule import Schedule

PIPELINE = "pipeline"


def send(schedule: Schedule, kind: str, leaves: Arrays) -> list[Arrays]:
    """Send what a stage made this tick, by every shift of `forward_shifts` or `backward_shifts`.

    A stage from which nobody needs it by that shift sends nothing, and one to which nobody sends gets zeros.
    """
    stage = np.asarray(schedule.ticks.stage_of)
    sources, targets = (stage[:-1], stage[1:]) if kind == "forward" else (stage[1:], stage[:-1])
    shifts = schedule.forward_shifts if kind == "forward" else schedule.backward_shifts
    used = set(zip(sources.tolist(), targets.tolist(), strict=True))
    sent = []
    for shift in shifts:
        pairs = sorted((s, t) for s, t in used if (t - s) % schedule.num_stages == shift)
        sent.append(permute(leaves, pairs) if shift else list(leaves))
    return sent


def permute(leaves: Sequence[Any], pairs: Sequence[tuple[int, int]], specs: Any = None) -> Arrays:
    """Send each leaf from stage to stage, as (source, target) pairs; `specs` say how leaves lie over tensor."""
    specs = [PartitionSpec()] * len(leaves) if specs is None else specs
    move = lambda xs: [jax.lax.ppermute(x, PIPELINE, list(pairs)) for x in xs]  # noqa: E731
    return shard_by_shard(move, list(leaves), specs)


def store_message(ring: Arrays, arrived: Sequence[Arrays], slots: Sequence[Any]) -> Arrays:
    """Put each message that has to wait into its slot of the ring; a slot of -1 is none."""
    if not ring:
        return ring
    for message, slot in zip(arrived, slots, strict=True):
        ring = jax.lax.cond(slot >= 0, rings.write_slot, lambda ring, *_: ring, ring, slot, message)
    return ring


def choose(source: Any, at_end: Any, arrived: Sequence[Arrays], ring: Arrays, slot: Any) -> Any:
    """Return what a pass works on: `at_end()` (source 0), a message just arrived (1, 2, ...), or one that waited.

    Args:
      source: which, as `sources` numbers them.
      at_end: what stands at that end of the model; None if this is known not to be it.
      arrived: the messages of this tick.
      ring: the messages that wait.
      slot: where in the ring.
    """
    branches = [at_end] if at_end is not None else []
    branches += [lambda message=message: message for message in arrived]
    branches += [lambda: rings.read_slot(ring, slot)] if ring else []
    return jax.lax.switch(source - (at_end is None), branches)


def sources(rows: dict[str, np.ndarray], kind: str, num_shifts: int) -> np.ndarray:
    """Number the sources of a pass [num_ticks, S] for `choose`: 0 the end of the model, then shifts, then the ring."""
    waited = rows[f"{kind}_waited"] >= 0
    return np.where(waited, num_shifts + 1, rows[f"{kind}_shift"] + 1).astype(np.int32)


# From the model's order of blocks, in which they are stored, to the schedule's, in which they run, and back.


Move = tuple[int, int, int, int]
"""(stage it is stored on, place there, stage it runs on, place there) of one virtual stage."""


def to_schedule(schedule: Schedule, leaves: Sequence[Any], specs: Sequence[PartitionSpec]) -> Arrays:
    """Bring each stage the blocks that it runs; the identity where a stage has one chunk, in order.

    Leaves are [L / S, ...], and `specs` say how they lie over tensor. A stage stores L / S blocks that follow each
    other in the model; with several chunks it runs others. One permute a chunk moves them, once a step.
    """
    return _exchange(schedule, leaves, specs, [(a, i, b, j) for a, i, b, j in _moves(schedule)])


def to_model(schedule: Schedule, leaves: Sequence[Any], specs: Sequence[PartitionSpec]) -> Arrays:
    """Bring blocks, or their gradients, back to where they are stored: the inverse of `to_schedule`."""
    return _exchange(schedule, leaves, specs, [(b, j, a, i) for a, i, b, j in _moves(schedule)])


def in_order(schedule: Schedule) -> bool:
    """Return whether each stage runs what it stores."""
    return all((a, i) == (b, j) for a, i, b, j in _moves(schedule))


def _moves(schedule: Schedule) -> list[Move]:
    chunks, ticks = schedule.num_chunks, schedule.ticks
    places = zip(ticks.stage_of, ticks.chunk_of, strict=True)
    return [(v // chunks, v % chunks, stage, chunk) for v, (stage, chunk) in enumerate(places)]


def _exchange(schedule: Schedule, leaves: Sequence[Any], specs: Sequence[PartitionSpec], moves: list[Move]) -> Arrays:
    if all((a, i) == (b, j) for a, i, b, j in moves):
        return list(leaves)
    chunks, stage = schedule.num_chunks, jax.lax.axis_index(PIPELINE)
    old = [x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]) for x in leaves]
    new = [jnp.zeros_like(x) for x in old]
    for round_ in _rounds(schedule.num_stages, moves):
        leaving = jnp.asarray([place for _, place, _, _ in sorted(round_)])[stage]
        coming = jnp.asarray([place for _, place in sorted((b, j) for _, _, b, j in round_)])[stage]
        sent = [jax.lax.dynamic_index_in_dim(x, leaving, 0, keepdims=False) for x in old]
        sent = permute(sent, [(a, b) for a, _, b, _ in round_], specs)
        new = [jax.lax.dynamic_update_index_in_dim(x, y, coming, 0) for x, y in zip(new, sent, strict=True)]
    return [x.reshape(leaf.shape) for x, leaf in zip(new, leaves, strict=True)]


def _rounds(num_stages: int, moves: list[Move]) -> list[list[Move]]:
    """Cut the moves into rounds in which every stage sends one chunk and receives one.

    Each stage is the source of as many moves as it is the target of, so there is such a round (a perfect matching),
    and what is left after it is of the same kind: König's theorem on regular bipartite graphs.
    """
    left, rounds = list(moves), []
    while left:
        round_ = _matching(num_stages, left)
        rounds.append(round_)
        left = [move for move in left if move not in round_]
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
