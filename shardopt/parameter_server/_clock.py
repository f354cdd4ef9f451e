"""The step of every worker, and the stale synchronous parallel bound, which decides who may start
the next step.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shardopt.core import (
    calling,
    check_count,
    format_error,
    is_integer,
    plural,
    type_error,
    value_error,
)

CALLER = "parameter_server"


class Clock(NamedTuple):
    """The number of steps that each worker has finished.

    It is immutable: every function below returns a new clock.

    A worker that has finished c steps is *at clock c*, and its next step is step c. Its
    **staleness** when it starts that step is c minus the clock of the slowest worker. The
    parameters that it reads contain every update of the steps 0 .. c - staleness - 1, and maybe
    some later updates. It may start while staleness <= max_staleness. The slowest worker may always
    start, so no worker waits for ever.

    Attributes:
      max_staleness: the bound, in clocks; None for no bound.
      steps: worker -> steps finished.
      slowest: the least clock of any worker; it never decreases. Without workers, the clock of the
        next worker to join.
      fastest: the greatest clock that any worker ever had.
    """

    max_staleness: int | None
    steps: Mapping[int, int] = {}
    slowest: int = 0
    fastest: int = 0


@calling(CALLER)
def make_clock(max_staleness: int | None) -> Clock:
    """Return a clock without workers.

    Raises:
      TypeError: if `max_staleness` is neither an integer nor None.
      ValueError: if it is negative.

    Example:
      >>> clock = join(join(make_clock(1), 0), 1)
      >>> clock = tick(tick(clock, 0), 0)  # worker 0 finishes two steps, worker 1 none
      >>> staleness(clock, 0), may_start(clock, 0), may_start(clock, 1)
      (2, False, True)

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
      2013.
    """
    check_max_staleness(max_staleness)
    return Clock(None if max_staleness is None else int(max_staleness))


@calling(CALLER)
def join(clock: Clock, worker: int) -> Clock:
    """Add a worker at the clock of the slowest: it need not wait, and other workers need not wait
    longer.
    """
    check_count("worker", worker, minimum=0)
    if worker in clock.steps:
        problem = (
            f"worker {worker} cannot join: it is there already, at clock {clock.steps[worker]}."
        )
        fix = "let it leave first, or give the newcomer a number of its own."
        raise value_error(problem, fix=fix)
    # At clock 0 a newcomer would be the slowest by far, and everybody would wait for it.
    return clock._replace(steps={**clock.steps, worker: clock.slowest})


def leave(clock: Clock, worker: int) -> Clock:
    """Remove a worker; if it was the slowest, other workers may start now.

    After the last worker has left, the next worker to join starts at the greatest clock that any
    worker ever had. So no worker does two steps of the same number.
    """
    clock_of(clock, worker)  # refuses a worker that is not there
    steps = {other: step for other, step in clock.steps.items() if other != worker}
    return clock._replace(steps=steps, slowest=min(steps.values(), default=clock.fastest))


def tick(clock: Clock, worker: int) -> Clock:
    """Count a step that a worker has finished."""
    step = clock_of(clock, worker)
    steps = {**clock.steps, worker: step + 1}
    # Only the slowest can raise the minimum. So most ticks cost no pass over thousands of workers.
    slowest = min(steps.values()) if step == clock.slowest else clock.slowest
    return Clock(clock.max_staleness, steps, slowest, max(clock.fastest, step + 1))


def staleness(clock: Clock, worker: int) -> int:
    """Return by how many steps the slowest worker is behind this one."""
    return clock_of(clock, worker) - clock.slowest


def may_start(clock: Clock, worker: int) -> bool:
    """Return whether a worker may start its next step."""
    return clock.max_staleness is None or staleness(clock, worker) <= clock.max_staleness


def clock_of(clock: Clock, worker: int) -> int:
    """Return the number of steps that a worker has finished."""
    if worker not in clock.steps:
        worker_list = ", ".join(map(str, sorted(clock.steps)[:8])) + (
            " ..." if len(clock.steps) > 8 else ""
        )
        problem = (
            f"worker {worker} is not among the {plural(len(clock.steps), 'worker')}"
            f" ({worker_list or 'none'})."
        )
        raise ValueError(
            format_error(
                CALLER, problem, fix="let it join; what a worker pushes after it left is lost."
            )
        )
    return clock.steps[worker]


_UNBOUNDED_FIX = "0 waits at every step, s lets the fastest run s steps ahead, None never waits."


def check_max_staleness(max_staleness: int | None) -> None:
    """Refuse a bound that is neither None nor an integer of at least 0."""
    if max_staleness is None:
        return
    if not is_integer(max_staleness):
        problem = (
            f"max_staleness must be an integer or None, got {max_staleness!r}"
            f" ({type(max_staleness).__name__})."
        )
        raise type_error(problem, fix=_UNBOUNDED_FIX)
    if max_staleness < 0:
        raise value_error(
            f"max_staleness must be at least 0, got {max_staleness}.", fix=_UNBOUNDED_FIX
        )
