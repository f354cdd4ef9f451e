"""When each pass of each micro-batch runs: the tables that a schedule is made of."""

import heapq
from typing import NamedTuple

import numpy as np

Table = tuple[tuple[int, ...], ...]
"""Integers [V, M]: one row a virtual stage, one column a micro-batch."""


class Ticks(NamedTuple):
    """The ticks of every pass, for V virtual stages and M micro-batches.

    Attributes:
      num_stages: S, the stages that work side by side.
      stage_of: [V], the stage on which each virtual stage lives. The model runs through the virtual stages in order.
      forward: [V, M], the tick of each forward pass.
      backward: [V, M], the tick of each backward pass; of the gradient of the input alone where `weight` is given.
      weight: [V, M], the tick of each gradient of the weights; None where `backward` computes that as well.
    """

    num_stages: int
    stage_of: tuple[int, ...]
    forward: Table
    backward: Table
    weight: Table | None = None

    @property
    def num_virtual_stages(self) -> int:
        """V: stages times chunks."""
        return len(self.stage_of)

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.forward[0])

    @property
    def num_chunks(self) -> int:
        """How many virtual stages live on each stage."""
        return self.num_virtual_stages // self.num_stages

    @property
    def num_ticks(self) -> int:
        """The last tick, plus one."""
        return 1 + max(int(when.max()) for when in self.passes.values())

    @property
    def chunk_of(self) -> tuple[int, ...]:
        """[V]: where each virtual stage stands among those of its stage, counted from 0."""
        seen: dict[int, int] = {}
        chunks = []
        for stage in self.stage_of:
            chunks.append(seen.get(stage, 0))
            seen[stage] = chunks[-1] + 1
        return tuple(chunks)

    @property
    def passes(self) -> dict[str, np.ndarray]:
        """The tables by kind, in the order in which one tick runs them: forward, backward, weight."""
        tables = {"forward": self.forward, "backward": self.backward, "weight": self.weight}
        return {kind: np.asarray(table) for kind, table in tables.items() if table is not None}

    @property
    def last_use(self) -> np.ndarray:
        """[V, M]: the tick after which nobody needs the activation of that forward pass."""
        return np.asarray(self.backward if self.weight is None else self.weight)


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


# Ring buffers: which slot each activation and each waiting message takes.


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


# The table as arrays with one row a tick, for a program that walks it.


def shifts(ticks: Ticks) -> dict[str, tuple[int, ...]]:
    """Return by how many stages messages move, modulo S, for the forward and the backward ones.

    On a ring, (1,) and (S - 1,): one permute each way. A shift of 0 stays where it is. One virtual stage: none.
    """
    stage = np.asarray(ticks.stage_of)
    ahead = np.diff(stage) % ticks.num_stages
    back = -np.diff(stage) % ticks.num_stages
    return {"forward": tuple(sorted({*ahead.tolist()})), "backward": tuple(sorted({*back.tolist()}))}


def tick_rows(ticks: Ticks, slots: Slots) -> dict[str, np.ndarray]:
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
