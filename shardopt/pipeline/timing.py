"""How long a schedule takes: every stage at its own pace, or all in step as the compiled program runs."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from shardopt.core.arguments import is_number
from shardopt.core.errors import format_error, plural
from shardopt.pipeline.ticks import LETTERS, Ticks, source

Times = float | Sequence[float]
"""How long a pass of one micro-batch takes: on every virtual stage, or [V], on each."""

Pace = Literal["own", "lockstep"]
"""`own`: a stage runs its next pass as soon as it is free and the message is there. `lockstep`: all begin a tick together."""


class PassTimes(NamedTuple):
    """How long everything takes.

    Attributes:
      passes: by kind, [V], each pass of a micro-batch; a backward that is not split takes backward + weight.
      communication: a message from one stage to another.
    """

    passes: dict[str, list[float]]
    communication: float


def pass_times(
    who: str, ticks: Ticks, *, forward: Times = 1, backward: Times = 1, weight: Times = 1, communication: float = 0
) -> PassTimes:
    """Read the arguments of `Schedule.table_time`.

    Raises:
      TypeError: if a time is not a number.
      ValueError: if there are not as many as virtual stages, or one is negative.
    """
    size = len(ticks.stage_of)
    passes = {
        kind: read_times(who, kind, given, size, "virtual stage")
        for kind, given in zip(LETTERS, (forward, backward, weight), strict=True)
    }
    (sending,) = read_times(who, "communication", communication, 1, "message")
    if ticks.weight is None:
        passes["backward"] = [b + w for b, w in zip(passes["backward"], passes.pop("weight"), strict=True)]
    return PassTimes(passes, sending)


def read_times(who: str, what: str, given: Times, size: int, noun: str) -> list[float]:
    """Return so many times of one number or as many; errors as of `pass_times`."""
    each: list[float] = list(given) if isinstance(given, Sequence | np.ndarray) else [given] * size
    if bad := [repr(one) for one in each if not is_number(one) and not isinstance(one, Fraction)]:
        raise TypeError(format_error(who, f"{what} must be numbers, got {', '.join(bad[:8])}."))
    if len(each) != size:
        what = f"{what} has {plural(len(each), 'time')} for {plural(size, noun)}."
        raise ValueError(format_error(who, what, fix="give one number, or one for each, in the model's order."))
    if min(each) < 0:
        raise ValueError(format_error(who, f"{what} must not be negative, got {min(each)}."))
    return each


def own_pace(ticks: Ticks, times: PassTimes) -> dict[str, list[list[float]]]:
    """Return when each pass begins, [V, M] by kind, if every stage goes at its own pace.

    Each stage runs its passes in the order of the table. A message leaves when the pass has ended, and nothing waits for it but what needs it. Between virtual stages of one stage it takes no time.
    """
    size = len(ticks.stage_of)
    begins = {kind: [[0.0] * ticks.num_micro_batches for _ in range(size)] for kind in times.passes}
    free: list[float] = [0] * ticks.num_stages
    done: dict[tuple[str, int, int], float] = {}
    for kind, v, m in in_order(ticks):
        stage, needed = ticks.stage_of[v], source(kind, v, m, size)
        start = free[stage]
        if needed is not None:
            start = max(start, done[needed] + (times.communication if ticks.stage_of[needed[1]] != stage else 0))
        begins[kind][v][m] = start
        free[stage] = done[kind, v, m] = start + times.passes[kind][v]
    return begins


def in_order(ticks: Ticks) -> list[tuple[str, int, int]]:
    """Return every pass (kind, virtual stage, micro-batch) by tick, and in the order within a tick.

    Whatever a pass needs comes before it, and those of one stage are in the order in which it runs them.
    """
    kinds = list(LETTERS)
    found = [
        (tick, kinds.index(kind), v, m)
        for kind, when in ticks.passes.items()
        for v, row in enumerate(when.tolist())
        for m, tick in enumerate(row)
    ]
    return [(kinds[place], v, m) for _, place, v, m in sorted(found)]


def stage_times(ticks: Ticks, times: PassTimes) -> tuple[float, ...]:
    """Return [S], the time of each stage from its first pass to its last, at its own pace."""
    begins, spans = own_pace(ticks, times), []
    for stage in range(ticks.num_stages):
        mine = [v for v, home in enumerate(ticks.stage_of) if home == stage]
        first = min(min(rows[v]) for rows in begins.values() for v in mine)
        spans.append(max(max(rows[v]) + times.passes[kind][v] for kind, rows in begins.items() for v in mine) - first)
    return tuple(spans)


def table_time(ticks: Ticks, times: PassTimes) -> float:
    """Return the time from the first pass to the last, stages at their own pace."""
    begins = own_pace(ticks, times)
    return max(max(row) + times.passes[kind][v] for kind, rows in begins.items() for v, row in enumerate(rows))


def program_begins(ticks: Ticks, times: PassTimes) -> np.ndarray:
    """Return [num_ticks + 1, S], when each stage begins each tick of the compiled program, and when it has ended the last.

    Messages that are used on the next tick are waited for by all: a tick takes as long as its busiest stage, then
    every message. Those that travel during the next tick are waited for at its end, by the stages that get them.
    """
    numbers = [x for each in times.passes.values() for x in each]
    load = np.zeros((ticks.num_ticks, ticks.num_stages), np.asarray(numbers).dtype)
    for kind, when in ticks.passes.items():
        cost = np.broadcast_to(np.asarray(times.passes[kind])[:, None], when.shape)
        np.add.at(load, (when, np.asarray(ticks.stage_of)[:, None]), cost)
    along = {(a, b) for a, b in zip(ticks.stage_of[:-1], ticks.stage_of[1:], strict=True) if a != b}
    senders, stages = np.asarray([*along, *((b, a) for a, b in along)], int).reshape(-1, 2).T
    begins = np.zeros((ticks.num_ticks + 1, ticks.num_stages), np.asarray([*numbers, times.communication]).dtype)
    for tick, spent in enumerate(load):
        if ticks.message_ticks == 1:
            begins[tick + 1] = begins[tick] + spent.max() + (times.communication if along else 0)
        else:
            begins[tick + 1] = begins[tick] + spent
            np.maximum.at(begins[tick + 1], stages, begins[tick, senders] + times.communication)
    return begins


def program_time(ticks: Ticks, times: PassTimes) -> float:
    """Return the time of the compiled program."""
    last = program_begins(ticks, times)[-1].max()
    return last.item() if isinstance(last, np.generic) else last


def idle_fraction(ticks: Ticks, times: PassTimes, time: float) -> Fraction:
    """Return the idle share of all stages in a given time, exactly."""
    work = ticks.num_micro_batches * sum(Fraction(x) for each in times.passes.values() for x in each)
    # a time of rounded sums may be below the work of its only stage
    return max(1 - work / (ticks.num_stages * Fraction(time)), Fraction(0)) if time else Fraction(0)
