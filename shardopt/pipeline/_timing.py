"""How long a schedule takes: with every stage at its own pace, or in lockstep as the compiled
program runs.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from shardopt.core import is_number, plural, type_error, value_error
from shardopt.pipeline._ticks import LETTERS, Ticks, input_pass_of

Times = float | Sequence[float]
"""The time of a pass of one micro-batch: one number, or [V] numbers, one per virtual stage."""

Pace = Literal["own", "lockstep"]
"""`own`: a stage runs its next pass as soon as it is free and the message has arrived. `lockstep`:
all begin a tick together.
"""


class Durations(TypedDict, total=False):
    """The times that a user states, see `Schedule.table_time`."""

    forward: Times
    backward: Times
    weight: Times
    communication: float


class PassTimes(NamedTuple):
    """The times of passes and messages.

    Attributes:
      passes: by kind, [V], the time of each pass of a micro-batch; a backward that is not split
        takes backward + weight.
      communication: the time of a message from one stage to another.
    """

    passes: dict[str, list[float]]
    communication: float


def pass_times(
    ticks: Ticks,
    *,
    forward: Times = 1,
    backward: Times = 1,
    weight: Times = 1,
    communication: float = 0,
) -> PassTimes:
    """Check the arguments of `Schedule.table_time` and return them as `PassTimes`.

    Raises:
      TypeError: if a time is not a number.
      ValueError: if there are not as many times as virtual stages, or a time is negative.
    """
    size = len(ticks.stage_of)
    passes = {
        kind: read_times(kind, times, size, "virtual stage")
        for kind, times in zip(LETTERS, (forward, backward, weight), strict=True)
    }
    (sending,) = read_times("communication", communication, 1, "message")
    if ticks.weight is None:
        passes["backward"] = [
            b + w for b, w in zip(passes["backward"], passes.pop("weight"), strict=True)
        ]
    return PassTimes(passes, sending)


def read_times(argument: str, times: Times, size: int, noun: str) -> list[float]:
    """Return a list of `size` times from one number or a sequence.

    Raises the errors of `pass_times`.
    """
    time_list: list[float] = (
        list(times) if isinstance(times, Sequence | np.ndarray) else [times] * size
    )
    bad_times = [
        repr(time) for time in time_list if not is_number(time) and not isinstance(time, Fraction)
    ]
    if bad_times:
        raise type_error(f"{argument} must be numbers, got {', '.join(bad_times[:8])}.")
    if len(time_list) != size:
        argument = f"{argument} has {plural(len(time_list), 'time')} for {plural(size, noun)}."
        raise value_error(argument, fix="give one number, or one for each, in the model's order.")
    if min(time_list) < 0:
        raise value_error(f"{argument} must not be negative, got {min(time_list)}.")
    return time_list


def own_pace(ticks: Ticks, times: PassTimes) -> dict[str, list[list[float]]]:
    """Return when each pass begins, [V, M] by kind, if every stage goes at its own pace.

    Each stage runs its passes in the order of the table. A message leaves when its pass has ended,
    and only the pass that needs the message waits for it. Between virtual stages of one stage a
    message takes no time.
    """
    size = len(ticks.stage_of)
    begins = {kind: [[0.0] * ticks.num_micro_batches for _ in range(size)] for kind in times.passes}
    free_at: list[float] = [0] * ticks.num_stages
    end_of: dict[tuple[str, int, int], float] = {}
    # By tick, so the input of each pass has its end in `end_of` already.
    for kind, v, m in in_order(ticks):
        stage = ticks.stage_of[v]
        input_pass = input_pass_of(kind, v, m, size)
        start = free_at[stage]
        if input_pass is not None:
            start = max(
                start,
                end_of[input_pass]
                + (times.communication if ticks.stage_of[input_pass[1]] != stage else 0),
            )
        begins[kind][v][m] = start
        free_at[stage] = end_of[kind, v, m] = start + times.passes[kind][v]
    return begins


def in_order(ticks: Ticks) -> list[tuple[str, int, int]]:
    """Return every pass (kind, virtual stage, micro-batch) by tick, and in the order within a tick.

    The inputs of a pass precede it, and the passes of one stage are in the order of their runs.
    """
    kinds = list(LETTERS)
    passes = [
        (tick, kinds.index(kind), v, m)
        for kind, pass_ticks in ticks.passes.items()
        for v, row in enumerate(pass_ticks.tolist())
        for m, tick in enumerate(row)
    ]
    return [(kinds[kind_index], v, m) for _, kind_index, v, m in sorted(passes)]


def stage_times(ticks: Ticks, times: PassTimes) -> tuple[float, ...]:
    """Return [S], the time of each stage from its first pass to its last, at its own pace."""
    begins = own_pace(ticks, times)
    spans = []
    for stage in range(ticks.num_stages):
        virtual_stages = [v for v, stage_of_v in enumerate(ticks.stage_of) if stage_of_v == stage]
        first = min(min(rows[v]) for rows in begins.values() for v in virtual_stages)
        spans.append(
            max(
                max(rows[v]) + times.passes[kind][v]
                for kind, rows in begins.items()
                for v in virtual_stages
            )
            - first
        )
    return tuple(spans)


def table_time(ticks: Ticks, times: PassTimes) -> float:
    """Return the time from the first pass to the last, with stages at their own pace."""
    begins = own_pace(ticks, times)
    return max(
        max(row) + times.passes[kind][v]
        for kind, rows in begins.items()
        for v, row in enumerate(rows)
    )


def program_begins(ticks: Ticks, times: PassTimes) -> np.ndarray:
    """Return [num_ticks + 1, S]: when each stage begins each tick of the compiled program, and in
    the last row when it ends.

    If messages are used on the next tick, all stages wait for them: a tick takes as long as its
    busiest stage, plus the message time. If messages travel during the next tick, their receivers
    wait for them at the end of that tick.
    """
    all_times = [x for durations in times.passes.values() for x in durations]
    load = np.zeros((ticks.num_ticks, ticks.num_stages), np.asarray(all_times).dtype)
    for kind, pass_ticks in ticks.passes.items():
        cost = np.broadcast_to(np.asarray(times.passes[kind])[:, None], pass_ticks.shape)
        np.add.at(load, (pass_ticks, np.asarray(ticks.stage_of)[:, None]), cost)
    stage_pairs = {
        (a, b) for a, b in zip(ticks.stage_of[:-1], ticks.stage_of[1:], strict=True) if a != b
    }
    senders, receivers = (
        np.asarray([*stage_pairs, *((b, a) for a, b in stage_pairs)], int).reshape(-1, 2).T
    )
    begins = np.zeros(
        (ticks.num_ticks + 1, ticks.num_stages), np.asarray([*all_times, times.communication]).dtype
    )
    for tick, busy_times in enumerate(load):
        if ticks.message_ticks == 1:
            begins[tick + 1] = (
                begins[tick] + busy_times.max() + (times.communication if stage_pairs else 0)
            )
        else:
            # The messages of this tick were computed on the last one. They leave as it begins, and
            # a stage with long passes does not notice them.
            begins[tick + 1] = begins[tick] + busy_times
            np.maximum.at(begins[tick + 1], receivers, begins[tick, senders] + times.communication)
    return begins


def program_time(ticks: Ticks, times: PassTimes) -> float:
    """Return the time of the compiled program."""
    last = program_begins(ticks, times)[-1].max()
    return last.item() if isinstance(last, np.generic) else last


def idle_fraction(ticks: Ticks, times: PassTimes, time: float) -> Fraction:
    """Return the idle share of all stages in a given time, as an exact fraction."""
    work = ticks.num_micro_batches * sum(
        Fraction(x) for durations in times.passes.values() for x in durations
    )
    # rounded sums can make the time shorter than the work of a single stage
    return max(1 - work / (ticks.num_stages * Fraction(time)), Fraction(0)) if time else Fraction(0)
