"""What goes from stage to stage: permutes over the mesh axis `pipeline`, always outside of branches."""

from collections.abc import Sequence
from typing import Any

import jax
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


def put_down(ring: Arrays, arrived: Sequence[Arrays], slots: Sequence[Any]) -> Arrays:
    """Put each message that has to wait into its slot of the ring; a slot of -1 is none."""
    if not ring:
        return ring
    for message, slot in zip(arrived, slots, strict=True):
        ring = jax.lax.cond(slot >= 0, rings.put, lambda ring, *_: ring, ring, slot, message)
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
    branches += [lambda: rings.take(ring, slot)] if ring else []
    return jax.lax.switch(source - (at_end is None), branches)


def sources(rows: dict[str, np.ndarray], kind: str, num_shifts: int) -> np.ndarray:
    """Number the sources of a pass [num_ticks, S] for `choose`: 0 the end of the model, then shifts, then the ring."""
    waited = rows[f"{kind}_waited"] >= 0
    return np.where(waited, num_shifts + 1, rows[f"{kind}_shift"] + 1).astype(np.int32)
