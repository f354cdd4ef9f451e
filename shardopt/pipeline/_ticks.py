"""The tables of a schedule: the tick of each pass of each micro-batch, and the slot of its result."""

import heapq
from collections import Counter
from typing import NamedTuple

import numpy as np

Table = tuple[tuple[int, ...], ...]
"""Integers [V, M], hashable: one row per virtual stage, one column per micro-batch."""

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
"""The letter of each kind of pass in a printed schedule; one tick runs the kinds in this order."""


class Ticks(NamedTuple):
    """The ticks of every pass, for V virtual stages and M micro-batches.

    Attributes:
      num_stages: S, the stages that work in parallel.
      stage_of: [V], the stage that runs each virtual stage. The model runs through the virtual
        stages in order.
      forward: [V, M], the tick of each forward pass.
      backward: [V, M], the tick of each backward pass. If `weight` is given, it computes only the
        gradient of the input.
      weight: [V, M], the tick of each gradient of the weights; None if `backward` computes these
        gradients as well.
      message_ticks: the number of ticks after which another stage can use a message. If it is 1,
        all stages wait for the message at the end of the tick that made it. If it is 2, the message
        travels while the next tick runs.
    """

    num_stages: int
    stage_of: tuple[int, ...]
    forward: Table
    backward: Table
    weight: Table | None = None
    message_ticks: int = 1

    @property
    def arrival_ticks(self) -> np.ndarray:
        """[V - 1, 1]: how many ticks a message between virtual stages v and v + 1 takes, in either
        direction; 1 within a stage.
        """
        return np.where(np.diff(self.stage_of) == 0, 1, self.message_ticks)[:, None]

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.forward[0])

    @property
    def num_chunks(self) -> int:
        """The number of virtual stages on each stage."""
        return len(self.stage_of) // self.num_stages

    @property
    def num_ticks(self) -> int:
        """The last tick, plus one."""
        return 1 + max(int(pass_ticks.max()) for pass_ticks in self.passes.values())

    @property
    def chunk_of(self) -> tuple[int, ...]:
        """[V]: the index of each virtual stage among the virtual stages of its stage."""
        count_on_stage: Counter[int] = Counter()
        chunks = []
        for stage in self.stage_of:
            chunks.append(count_on_stage[stage])
            count_on_stage[stage] += 1
        return tuple(chunks)

    @property
    def passes(self) -> dict[str, np.ndarray]:
        """The tables [V, M] by kind, in the order of one tick: forward, backward, weight."""
        tables = zip(LETTERS, (self.forward, self.backward, self.weight), strict=True)
        return {kind: np.asarray(table) for kind, table in tables if table is not None}


def input_pass_of(
    kind: str, v: int, m: int, num_virtual_stages: int
) -> tuple[str, int, int] | None:
    """Return the pass (kind, virtual stage, micro-batch) whose result this pass waits for.

    None for the first virtual stage's forward.
    """
    if kind == "forward":
        return ("forward", v - 1, m) if v > 0 else None
    if kind == "backward":
        return ("backward", v + 1, m) if v < num_virtual_stages - 1 else ("forward", v, m)
    return ("backward", v, m)


def as_table(array: np.ndarray) -> Table:
    """Return nested tuples of Python integers: hashable, comparable, immutable."""
    return tuple(map(tuple, array.tolist()))


class Slots(NamedTuple):
    """The slot that each value takes in its stage's ring buffers until its last use, [V, M] each.

    -1 if nothing is stored.

    Attributes:
      activation: the result of a forward pass that its backward or weight pass reads.
      input: a forward message that is not used on the tick of its arrival.
      cotangent: a backward message that is not used on the tick of its arrival.
      deferred: the values that a backward pass stores for its weight pass; always -1 if no weight
        passes are split off.
    """

    activation: Table
    input: Table
    cotangent: Table
    deferred: Table

    def count(self, buffer: str) -> int:
        """Return how many slots a ring buffer needs, the same on every stage."""
        return 1 + max(map(max, getattr(self, buffer)))


def assign_slots(ticks: Ticks) -> Slots:
    """Give each lifetime the lowest free slot on its stage, in the order of their starts.

    This greedy colouring is optimal on intervals: it takes as many slots as values are live at the
    worst tick.
    """
    return Slots(
        **{
            buffer: _assign(ticks, first, last)
            for buffer, (first, last) in lifetimes(ticks).items()
        }
    )


def _assign(ticks: Ticks, first: np.ndarray, last: np.ndarray) -> Table:
    slots = np.full(first.shape, -1)
    stored = np.argwhere(last >= first)
    stages = np.asarray(ticks.stage_of)[stored[:, 0]]
    order = np.argsort(stages, kind="stable")
    for on_stage in np.split(stored[order], np.flatnonzero(np.diff(stages[order])) + 1):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (last tick, slot), soonest first
        for start, end, v, m in sorted(
            (int(first[v, m]), int(last[v, m]), v, m) for v, m in on_stage
        ):
            # Strictly below: a value is still read on its last tick.
            while busy and busy[0][0] < start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            # Every slot so far is in `free` or in `busy`. If none is free, `len(busy)` is the next
            # new number.
            slots[v, m] = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (end, int(slots[v, m])))
    return as_table(slots)


def num_live(ticks: Ticks) -> np.ndarray:
    """Return [num_ticks, S], how many activations each stage stores at each tick."""
    first, last = lifetimes(ticks)["activation"]
    stage = np.broadcast_to(np.asarray(ticks.stage_of)[:, None], first.shape)
    is_stored = last >= first
    change = np.zeros((ticks.num_ticks + 1, ticks.num_stages), int)
    # One more from the first tick on, one fewer after the last: the running sum counts live values.
    np.add.at(change, (first[is_stored], stage[is_stored]), 1)
    np.add.at(change, (last[is_stored] + 1, stage[is_stored]), -1)
    return change.cumsum(axis=0)[:-1]


def lifetimes(ticks: Ticks) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the first and the last tick of every stored value, [V, M] each.

    The last tick is -1 if nothing is stored.

    Both ticks count as live. Within a tick arrivals are stored first, then forward, backward and
    weight run in this order. So a forward must not write into a slot that the backward of the same
    tick still reads.
    """
    forward = np.asarray(ticks.forward)
    backward = np.asarray(ticks.backward)
    weight = None if ticks.weight is None else np.asarray(ticks.weight)
    # the ends of the model receive no message, so they wait for none
    input_arrival = np.concatenate([forward[:1], forward[:-1] + ticks.arrival_ticks])
    cotangent_arrival = np.concatenate([backward[1:] + ticks.arrival_ticks, backward[-1:]])
    return {
        "activation": (forward, backward if weight is None else weight),
        "input": (input_arrival, np.where(input_arrival < forward, forward, -1)),
        "cotangent": (cotangent_arrival, np.where(cotangent_arrival < backward, backward, -1)),
        "deferred": (backward, np.full_like(backward, -1) if weight is None else weight),
    }


def shifts(ticks: Ticks) -> dict[str, tuple[int, ...]]:
    """Return by how many stages, modulo S, forward and backward messages move.

    If virtual stage v is on stage v mod S, these are (1,) and (S - 1,): one permute in each
    direction. A message with shift 0 stays on its stage. A single virtual stage has no shifts.
    """
    ahead = np.diff(ticks.stage_of)
    moves = {"forward": ahead % ticks.num_stages, "backward": -ahead % ticks.num_stages}
    return {kind: tuple(sorted({*move.tolist()})) for kind, move in moves.items()}


def tick_table(ticks: Ticks, slots: Slots) -> dict[str, np.ndarray]:
    """Return the arrays that `Schedule.table` describes."""
    table = {}
    for kind, pass_ticks in ticks.passes.items():
        v, m = (np.asarray(index) for index in np.indices(pass_ticks.shape))
        table[f"{kind}_micro_batch"] = _by_tick(ticks, pass_ticks, m)
        table[f"{kind}_chunk"] = _by_tick(ticks, pass_ticks, np.asarray(ticks.chunk_of)[v])
        table[f"{kind}_slot"] = _by_tick(ticks, pass_ticks, np.asarray(slots.activation))
    for kind, step, wait_slots in (("forward", 1, slots.input), ("backward", -1, slots.cotangent)):
        table |= _message_columns(ticks, kind, step, np.asarray(wait_slots))
    if ticks.weight is not None:
        for kind in ("backward", "weight"):
            table[f"{kind}_deferred"] = _by_tick(
                ticks, ticks.passes[kind], np.asarray(slots.deferred)
            )
    return table


def _message_columns(
    ticks: Ticks, kind: str, step: int, wait_slots: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns with the source, the waiting slot and the arrival of one direction's
    messages; `step` leads to the receiver.
    """
    shift_list = shifts(ticks)[kind]
    pass_ticks = ticks.passes[kind]
    stage = np.asarray(ticks.stage_of)
    shift_of = np.full(pass_ticks.shape, -1)
    arrivals = np.full((ticks.num_ticks, ticks.num_stages, len(shift_list)), -1, np.int32)
    for v in range(len(stage)):
        sender = v - step
        if 0 <= sender < len(stage):
            # Each shift is one permute for all stages. A receiver looks for its message there.
            shift_of[v] = shift_list.index((stage[v] - stage[sender]) % ticks.num_stages)
            waits = wait_slots[v] >= 0
            arrival_tick = pass_ticks[sender, waits] + ticks.arrival_ticks[min(v, sender), 0]
            arrivals[arrival_tick, stage[v], shift_of[v, 0]] = wait_slots[v, waits]
    return {
        f"{kind}_shift": _by_tick(ticks, pass_ticks, np.where(wait_slots >= 0, -1, shift_of)),
        f"{kind}_waited": _by_tick(ticks, pass_ticks, wait_slots),
        f"{kind}_arrival": arrivals,
    }


def _by_tick(ticks: Ticks, pass_ticks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Arrange values [V, M] by tick and stage, [num_ticks, S], with -1 for idle."""
    table = np.full((ticks.num_ticks, ticks.num_stages), -1, np.int32)
    table[pass_ticks, np.asarray(ticks.stage_of)[:, None]] = values
    return table
