"""Ring buffers: which slot each activation and each waiting message takes."""

import heapq
from typing import NamedTuple

import numpy as np

from shardopt.pipeline.ticks import Table, Ticks, as_table


class Slots(NamedTuple):
    """The slot of each thing that a stage has to keep, [V, M] each; -1 where nothing is kept.

    Attributes:
      activation: what a forward pass leaves for its last use.
      input: a forward message that is not used on the tick on which it arrives.
      cotangent: a backward message that is not used on the tick on which it arrives.
      deferred: what a backward pass leaves for its weight pass; -1 throughout where these are one.
    """

    activation: Table
    input: Table
    cotangent: Table
    deferred: Table

    def count(self, ring: str) -> int:
        """Return how many slots a ring needs, the same on every stage."""
        return 1 + max(max(row) for row in getattr(self, ring))


def color(ticks: Ticks) -> Slots:
    """Give each lifetime the lowest slot that is free on its stage, in the order in which they start.

    On intervals this greedy colouring is optimal: it takes as many slots as are live at once at the worst tick.
    """
    return Slots(**{ring: _color_ring(ticks, first, last) for ring, (first, last) in lifetimes(ticks).items()})


def live(ticks: Ticks, ring: str) -> np.ndarray:
    """Return how many things of a ring each stage keeps at each tick, [num_ticks, S]."""
    first, last = lifetimes(ticks)[ring]
    stage = np.broadcast_to(np.asarray(ticks.stage_of)[:, None], first.shape)
    kept = last >= first
    change = np.zeros((ticks.num_ticks + 1, ticks.num_stages), int)
    np.add.at(change, (first[kept], stage[kept]), 1)
    np.add.at(change, (last[kept] + 1, stage[kept]), -1)
    return change.cumsum(axis=0)[:-1]


def lifetimes(ticks: Ticks) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the first and the last tick, [V, M] each, of everything kept; the last is -1 where nothing is.

    Both ends count: within a tick arrivals are put down first, then forward, backward and weight run in this
    order, so what the forward of a tick writes must not lie where its backward still has to read.
    """
    forward, backward = np.asarray(ticks.forward), np.asarray(ticks.backward)
    # a message sent on one tick arrives on the next; the ends of the model are sent none, and wait for none
    input_arrival = np.concatenate([forward[:1], forward[:-1] + 1])
    cotangent_arrival = np.concatenate([backward[1:] + 1, backward[-1:]])
    return {
        "activation": (forward, ticks.last_use),
        "input": (input_arrival, np.where(input_arrival < forward, forward, -1)),
        "cotangent": (cotangent_arrival, np.where(cotangent_arrival < backward, backward, -1)),
        "deferred": (backward, np.full_like(backward, -1) if ticks.weight is None else ticks.last_use),
    }


def _color_ring(ticks: Ticks, first: np.ndarray, last: np.ndarray) -> Table:
    slots = np.full(first.shape, -1)
    kept = np.argwhere(last >= first)
    stages = np.asarray(ticks.stage_of)[kept[:, 0]]
    order = np.argsort(stages, kind="stable")
    for mine in np.split(kept[order], np.flatnonzero(np.diff(stages[order])) + 1):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (last tick, slot), soonest first
        for start, end, v, m in sorted((int(first[v, m]), int(last[v, m]), v, m) for v, m in mine):
            while busy and busy[0][0] < start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            slots[v, m] = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (end, int(slots[v, m])))
    return as_table(slots)
