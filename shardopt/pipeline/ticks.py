"""When each pass of each micro-batch runs, and in which slot its results wait: the tables a schedule is made of."""

import heapq
from collections import Counter
from typing import NamedTuple

import numpy as np

Table = tuple[tuple[int, ...], ...]
"""Integers [V, M], hashable: one row per virtual stage, one column per micro-batch."""

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
"""The kinds of passes, in the order in which one tick runs them, as schedules print them."""


class Ticks(NamedTuple):
    """The ticks of every pass, for V virtual stages and M micro-batches.

    Attributes:
      num_stages: S, the stages that work side by side.
      stage_of: [V], the stage on which each virtual stage lives. The model runs through the virtual stages in order.
      forward: [V, M], the tick of each forward pass.
      backward: [V, M], the tick of each backward pass; of the gradient of the input alone where `weight` is given.
      weight: [V, M], the tick of each gradient of the weights; None where `backward` computes that as well.
      message_ticks: after how many ticks a message can be used on another stage: 1 if all wait for it at the end of the
        tick that made it, 2 if it is sent while the next tick runs.
    """

    num_stages: int
    stage_of: tuple[int, ...]
    forward: Table
    backward: Table
    weight: Table | None = None
    message_ticks: int = 1

    @property
    def arrival_ticks(self) -> np.ndarray:
        """[V - 1]: how long what goes on between virtual stages v and v + 1 takes, in either direction; 1 within a stage."""
        return np.where(np.diff(self.stage_of) == 0, 1, self.message_ticks)[:, None]

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.forward[0])

    @property
    def num_chunks(self) -> int:
        """How many virtual stages live on each stage."""
        return len(self.stage_of) // self.num_stages

    @property
    def num_ticks(self) -> int:
        """The last tick, plus one."""
        return 1 + max(int(when.max()) for when in self.passes.values())

    @property
    def chunk_of(self) -> tuple[int, ...]:
        """[V]: where each virtual stage stands among those of its stage, counted from 0."""
        seen: Counter[int] = Counter()
        chunks = []
        for stage in self.stage_of:
            chunks.append(seen[stage])
            seen[stage] += 1
        return tuple(chunks)

    @property
    def passes(self) -> dict[str, np.ndarray]:
        """The tables [V, M] by kind, in the order in which one tick runs them: forward, backward, weight."""
        tables = zip(LETTERS, (self.forward, self.backward, self.weight), strict=True)
        return {kind: np.asarray(table) for kind, table in tables if table is not None}


def source(kind: str, v: int, m: int, num_virtual_stages: int) -> tuple[str, int, int] | None:
    """Return the pass (kind, virtual stage, micro-batch) whose result this one waits for; None at the very start."""
    if kind == "forward":
        return ("forward", v - 1, m) if v > 0 else None
    if kind == "backward":
        return ("backward", v + 1, m) if v < num_virtual_stages - 1 else ("forward", v, m)
    return ("backward", v, m)


def as_table(array: np.ndarray) -> Table:
    """Return nested tuples of Python integers: hashable, comparable, immutable."""
    return tuple(tuple(row) for row in array.tolist())


class Slots(NamedTuple):
    """The slot of its stage's ring buffers that each thing takes until its last use, [V, M] each; -1 where nothing is kept.

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

    def count(self, buffer: str) -> int:
        """Return how many slots a ring buffer needs, the same on every stage."""
        return 1 + max(max(row) for row in getattr(self, buffer))


def assign_slots(ticks: Ticks) -> Slots:
    """Give each lifetime the lowest slot that is free on its stage, in the order in which they start.

    On intervals this greedy colouring is optimal: it takes as many slots as are live at once at the worst tick.
    """
    return Slots(**{buffer: _assign(ticks, first, last) for buffer, (first, last) in lifetimes(ticks).items()})


def _assign(ticks: Ticks, first: np.ndarray, last: np.ndarray) -> Table:
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


def num_live(ticks: Ticks, buffer: str) -> np.ndarray:
    """Return [num_ticks, S], how many things of a ring buffer each stage keeps at each tick."""
    first, last = lifetimes(ticks)[buffer]
    stage = np.broadcast_to(np.asarray(ticks.stage_of)[:, None], first.shape)
    kept = last >= first
    change = np.zeros((ticks.num_ticks + 1, ticks.num_stages), int)
    np.add.at(change, (first[kept], stage[kept]), 1)
    np.add.at(change, (last[kept] + 1, stage[kept]), -1)
    return change.cumsum(axis=0)[:-1]


def lifetimes(ticks: Ticks) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the first and the last tick, [V, M] each, of everything kept; the last is -1 where nothing is.

    Both ends count: within a tick arrivals are stored first, then forward, backward and weight run in this
    order, so what the forward of a tick writes must not lie where its backward still has to read.
    """
    forward, backward = np.asarray(ticks.forward), np.asarray(ticks.backward)
    weight = None if ticks.weight is None else np.asarray(ticks.weight)
    # the ends of the model are sent no message, and wait for none
    input_arrival = np.concatenate([forward[:1], forward[:-1] + ticks.arrival_ticks])
    cotangent_arrival = np.concatenate([backward[1:] + ticks.arrival_ticks, backward[-1:]])
    return {
        "activation": (forward, backward if weight is None else weight),
        "input": (input_arrival, np.where(input_arrival < forward, forward, -1)),
        "cotangent": (cotangent_arrival, np.where(cotangent_arrival < backward, backward, -1)),
        "deferred": (backward, np.full_like(backward, -1) if weight is None else weight),
    }


def shifts(ticks: Ticks) -> dict[str, tuple[int, ...]]:
    """Return by how many stages messages move, modulo S, for the forward and the backward ones.

    Where virtual stage v lives on stage v mod S: (1,) and (S - 1,), one permute each way. A shift of 0 stays where it
    is. One virtual stage: none.
    """
    ahead = np.diff(ticks.stage_of)
    moves = {"forward": ahead % ticks.num_stages, "backward": -ahead % ticks.num_stages}
    return {kind: tuple(sorted({*move.tolist()})) for kind, move in moves.items()}


def tick_table(ticks: Ticks, slots: Slots) -> dict[str, np.ndarray]:
    """Return the arrays that `Schedule.table` describes."""
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
    for v in range(len(stage)):
        sender = v - step
        if 0 <= sender < len(stage):
            came_by[v] = directions.index((stage[v] - stage[sender]) % ticks.num_stages)
            kept = waiting[v] >= 0
            arrives = when[sender, kept] + ticks.arrival_ticks[min(v, sender), 0]
            received[arrives, stage[v], came_by[v, 0]] = waiting[v, kept]
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
