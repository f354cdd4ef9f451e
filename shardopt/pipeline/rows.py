"""The table as arrays with one row a tick, for a program that walks it."""

import numpy as np

from shardopt.pipeline.slots import Slots
from shardopt.pipeline.ticks import Ticks


def shifts(ticks: Ticks) -> dict[str, tuple[int, ...]]:
    """Return by how many stages messages move, modulo S, for the forward and the backward ones.

    On a ring, (1,) and (S - 1,): one permute each way. A shift of 0 stays where it is. One virtual stage: none.
    """
    stage = np.asarray(ticks.stage_of)
    ahead = np.diff(stage) % ticks.num_stages
    back = -np.diff(stage) % ticks.num_stages
    return {"forward": tuple(sorted({*ahead.tolist()})), "backward": tuple(sorted({*back.tolist()}))}


def rows(ticks: Ticks, slots: Slots) -> dict[str, np.ndarray]:
    """Return the arrays that `Schedule.rows` describes."""
    table = {}
    for kind, when in ticks.passes.items():
        v, m = (np.asarray(index) for index in np.indices(when.shape))
        table[f"{kind}_micro_batch"] = _by_tick(ticks, when, m)
        table[f"{kind}_chunk"] = _by_tick(ticks, when, np.asarray(ticks.chunk_of)[v])
        table[f"{kind}_slot"] = _by_tick(ticks, when, np.asarray(slots.activation))
    for kind, step, waiting in (("forward", 1, slots.input), ("backward", -1, slots.cotangent)):
        table |= _messages(ticks, kind, step, np.asarray(waiting))
    if ticks.weight is not None:
        for kind in ("backward", "weight"):
            table[f"{kind}_deferred"] = _by_tick(ticks, ticks.passes[kind], np.asarray(slots.deferred))
    return table


def _messages(ticks: Ticks, kind: str, step: int, waiting: np.ndarray) -> dict[str, np.ndarray]:
    """Where the messages of one direction come from, wait, and are used; `step` goes to the receiver."""
    directions = shifts(ticks)[kind]
    when, stage = ticks.passes[kind], np.asarray(ticks.stage_of)
    came_by = np.full(when.shape, -1)
    received = np.full((ticks.num_ticks, ticks.num_stages, len(directions)), -1, np.int32)
    for v in range(ticks.num_virtual_stages):
        sender = v - step
        if 0 <= sender < ticks.num_virtual_stages:
            came_by[v] = directions.index((stage[v] - stage[sender]) % ticks.num_stages)
            kept = waiting[v] >= 0
            received[when[sender, kept] + 1, stage[v], came_by[v, 0]] = waiting[v, kept]
    return {
        f"{kind}_shift": _by_tick(ticks, when, np.where(waiting >= 0, -1, came_by)),
        f"{kind}_waited": _by_tick(ticks, when, waiting),
        f"{kind}_arrival": received,
    }


def _by_tick(ticks: Ticks, when: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Lay values [V, M] out by tick and stage, [num_ticks, S], with -1 where nothing runs."""
    table = np.full((ticks.num_ticks, ticks.num_stages), -1, np.int32)
    table[when, np.asarray(ticks.stage_of)[:, None]] = values
    return table
