"""Who is at which step, and who may start the next one: the stale synchronous parallel bound."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.errors import format_error, plural

WHO = "parameter_server"

Value = TypeVar("Value")
_BITS = 6


class PersistentMap(Mapping[int, Value]):
    """A mapping from integers that never changes; `put` and `drop` return another that shares most of it.

    Keys that agree but for their last six bits share a bucket. A change copies one bucket and the table of buckets:
    for n keys about n / 64 + 64 references, where a dict would copy n.

    Example:
      >>> one = PersistentMap().put(3, "a")
      >>> two = one.put(70, "b").drop(3)
      >>> dict(one), dict(two), len(two)
      ({3: 'a'}, {70: 'b'}, 1)
    """

    __slots__ = ("_buckets", "_size")

    def __init__(self, _buckets: dict[int, dict[int, Value]] | None = None, _size: int = 0):
        self._buckets, self._size = _buckets or {}, _size

    def __getitem__(self, key: int) -> Value:
        return self._buckets[key >> _BITS][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and key in self._buckets.get(key >> _BITS, ())

    def __iter__(self) -> Iterator[int]:
        return (key for bucket in self._buckets.values() for key in bucket)

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)})"

    def put(self, key: int, value: Value) -> "PersistentMap[Value]":
        """Return the mapping with this entry."""
        old = self._buckets.get(key >> _BITS, {})
        bucket, buckets = old.copy(), self._buckets.copy()
        bucket[key] = value
        buckets[key >> _BITS] = bucket
        return PersistentMap(buckets, self._size + (key not in old))

    def drop(self, key: int) -> "PersistentMap[Value]":
        """Return the mapping without this key, whether it has it or not."""
        if key not in self:
            return self
        bucket, buckets = self._buckets[key >> _BITS].copy(), self._buckets.copy()
        del bucket[key]
        if bucket:
            buckets[key >> _BITS] = bucket
        else:
            del buckets[key >> _BITS]
        return PersistentMap(buckets, self._size - 1)


class Clock(NamedTuple):
    """The steps that each worker has finished. A value: every function below returns a new one.

    A worker that has finished c steps is *at clock c*; the step it does next is step c. Its **staleness** when it
    starts that step is c less the clock of the slowest worker: what it reads holds every update of steps
    0 .. c - staleness - 1, and maybe some of later ones. It may start while staleness <= max_staleness. The slowest
    worker may always start, so nobody waits for ever.

    Attributes:
      max_staleness: the bound, in clocks; None for no bound.
      steps: worker -> steps finished.
      counts: clock -> how many workers are at it.
      slowest: the least clock of any worker; it never falls. Without workers, the clock that the next one gets.
      fastest: the greatest clock that any worker ever had.
    """

    max_staleness: int | None
    steps: PersistentMap[int] = PersistentMap()
    counts: Mapping[int, int] = {}
    slowest: int = 0
    fastest: int = 0


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
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    """
    check_max_staleness(WHO, max_staleness)
    return Clock(None if max_staleness is None else int(max_staleness))


def join(clock: Clock, worker: int) -> Clock:
    """Let a worker in, at the clock of the slowest: it neither waits nor makes anyone wait longer."""
    check_count(WHO, "worker", worker, least=0)
    if worker in clock.steps:
        what = f"worker {worker} cannot join: it is there already, at clock {clock.steps[worker]}."
        raise ValueError(format_error(WHO, what, fix="let it leave first, or give the newcomer a number of its own."))
    at = clock.slowest
    return clock._replace(
        steps=clock.steps.put(worker, at),
        counts={**clock.counts, at: clock.counts.get(at, 0) + 1},
    )


def leave(clock: Clock, worker: int) -> Clock:
    """Forget a worker; if it was the slowest, others may start now.

    When the last one leaves, the next to join starts at the greatest clock that ever was, so that no step of a
    worker is done twice under the same number.
    """
    at = clock_of(clock, worker)
    counts = _less_one(clock.counts, at)
    return clock._replace(steps=clock.steps.drop(worker), counts=counts, slowest=min(counts, default=clock.fastest))


def tick(clock: Clock, worker: int) -> Clock:
    """Count a step that a worker has finished."""
    at = clock_of(clock, worker)
    counts = _less_one(clock.counts, at)
    counts[at + 1] = counts.get(at + 1, 0) + 1
    # Whoever was the last at the least clock is now one above it, and nobody is between.
    slowest = at + 1 if at == clock.slowest and at not in counts else clock.slowest
    steps = clock.steps.put(worker, at + 1)
    return Clock(clock.max_staleness, steps, counts, slowest, max(clock.fastest, at + 1))


def staleness(clock: Clock, worker: int) -> int:
    """Return by how many steps the slowest worker is behind this one."""
    return clock_of(clock, worker) - clock.slowest


def may_start(clock: Clock, worker: int) -> bool:
    """Return whether a worker may start its next step."""
    return clock.max_staleness is None or staleness(clock, worker) <= clock.max_staleness


def clock_of(clock: Clock, worker: int) -> int:
    """Return the steps that a worker has finished."""
    if worker not in clock.steps:
        listed = ", ".join(map(str, sorted(clock.steps)[:8])) + (" ..." if len(clock.steps) > 8 else "")
        what = f"worker {worker} is not among the {plural(len(clock.steps), 'worker')} ({listed or 'none'})."
        raise ValueError(format_error(WHO, what, fix="let it join; what a worker pushes after it left is lost."))
    return clock.steps[worker]


def _less_one(counts: Mapping[int, int], at: int) -> dict[int, int]:
    left = dict(counts)
    left[at] -= 1
    if not left[at]:
        del left[at]
    return left


_UNBOUNDED_FIX = "0 waits at every step, s lets the fastest run s steps ahead, None never waits."


def check_max_staleness(who: str, max_staleness: int | None) -> None:
    """Refuse a bound that is neither None nor an integer of at least 0."""
    if max_staleness is None:
        return
    if not is_integer(max_staleness):
        what = f"max_staleness must be an integer or None, got {max_staleness!r} ({type(max_staleness).__name__})."
        raise TypeError(format_error(who, what, fix=_UNBOUNDED_FIX))
    if max_staleness < 0:
        raise ValueError(
            format_error(who, f"max_staleness must be at least 0, got {max_staleness}.", fix=_UNBOUNDED_FIX)
        )


def should_sync(step: int, max_staleness: int) -> bool:
    """Say whether a worker that may be `max_staleness` steps behind fetches the parameters before this step.

    True at every step if max_staleness = 0, and otherwise where step mod (max_staleness + 1) = 0: parameters
    fetched at one step serve it and the max_staleness steps after it.

    Args:
      step: the worker's own step, counted from 0.
      max_staleness: for how many further steps fetched parameters may be used.

    Returns:
      Whether to fetch.

    Raises:
      TypeError: if an argument is not an integer.
      ValueError: if an argument is negative.

    Example:
      >>> [should_sync(step, 2) for step in range(7)]
      [True, False, False, True, False, False, True]
      >>> [should_sync(step, 0) for step in range(3)]
      [True, True, True]

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013, section 3:
      the cache of a worker is read until it is too old.
    """
    check_count("should_sync", "step", step, least=0)
    check_count("should_sync", "max_staleness", max_staleness, least=0)
    return bool(step % (max_staleness + 1) == 0)
