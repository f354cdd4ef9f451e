"""`plan_recovery`: when to save, how many spares and islands, and the goodput that follows, in
closed form.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardopt.core import calling, check_count, check_number, plural, type_error, value_error


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often chips fail, and the cost of a failure. All times are in seconds.

    Attributes:
      mtbf: mean time between two failures of one chip, while it trains. A job of n chips that fails
        every h seconds of training has a `mtbf` of n h.
      restart: from the moment a failure is noticed until the job trains again: processes start,
        programs are compiled or loaded, the newest copy of the state is read. It contains restarts
        that fail themselves.
      save: training waits this long for one checkpoint. A write in the background is not part of
        it.
      detect: until a failure is noticed.
      replace: until a new host is there, if no spare waits. A spare that is used up is replaced
        after this time.
      host_chips: chips of one host, which is the size of a spare.
      snapshot: training waits this long for one snapshot in the memory of other hosts. None: there
        are no snapshots.
      wide: share of failures that no copy in memory survives, from 0 to 1. The whole job restarts
        from its checkpoint.
      islands: numbers of islands to try. Islands train on while one of them restarts; 1 is a
        synchronous job.
      exchange: time between two exchanges of islands. An island that restarts loses its work since
        the last exchange.
      stall: the other islands wait this long when one fails; 0 if they never wait for each other.

    Raises:
      TypeError: if an attribute is of the wrong kind.
      ValueError: if a number is out of range.

    Example:
      >>> failures = Failures(mtbf=50_000 * 3600, restart=300, save=5, snapshot=0.5)
      >>> failures.host_chips
      8
    """

    mtbf: float
    restart: float
    save: float
    detect: float = 0.0
    replace: float = 0.0
    host_chips: int = 8
    snapshot: float | None = None
    wide: float = 0.0
    islands: tuple[int, ...] = (1,)
    exchange: float = 0.0
    stall: float = 0.0

    def __post_init__(self) -> None:
        with calling("Failures"):
            for name in ("mtbf", "save"):
                check_number(name, getattr(self, name), positive=True)
            for name in ("restart", "detect", "replace", "wide", "exchange", "stall"):
                check_number(name, getattr(self, name))
            if self.snapshot is not None:
                check_number("snapshot", self.snapshot, positive=True)
            if self.wide > 1:
                raise value_error(f"wide must be at most 1, got {self.wide}.")
            check_count("host_chips", self.host_chips)
            if not isinstance(self.islands, tuple) or not self.islands:
                problem = f"islands must be a tuple of integers, got {self.islands!r}."
                raise type_error(problem, fix="pass for example islands=(1, 2, 4).")
            for count in self.islands:
                check_count("islands", count)


CAUSES: tuple[str, ...] = (
    "checkpoint",
    "snapshot",
    "redone",
    "detect",
    "restart",
    "replace",
    "stall",
    "spares",
)
"""The causes of lost time, in the order of `Recovery.lost`."""


class Recovery(NamedTuple):
    """How a job survives failures, and the goodput that follows.

    `print` shows a table of the lost time.

    Attributes:
      chips: chips that train, without spares.
      islands: groups of chips that restart alone.
      spares: hosts that wait for a failure.
      save_every: seconds of training between two checkpoints; None if no failure needs a
        checkpoint.
      snapshot_every: seconds of training between two snapshots; None without snapshots.
      step_seconds: seconds of a step; None if it is unknown. Then periods are not rounded to steps.
      interval: seconds between two failures of the job, on the clock.
      goodput: time of steps that count, as a share of the time of all chips, spares included.
      lost: the other shares, by cause, only causes with lost time:

        - "checkpoint": training waits for a checkpoint;
        - "snapshot": training waits for a snapshot;
        - "redone": steps since the newest copy of the state that survives;
        - "detect", "restart", "replace": as in `Failures`;
        - "stall": islands wait for another one, which has failed;
        - "spares": the chips of spares.
    """

    chips: int
    islands: int
    spares: int
    save_every: float | None
    snapshot_every: float | None
    step_seconds: float | None
    interval: float
    goodput: float
    lost: Mapping[str, float]

    @property
    def training_share(self) -> float:
        """Time of steps that count, as a share of the time of the chips that train, without spares.

        Published runs state this share.
        """
        return self.goodput / (1 - self.lost.get("spares", 0.0))

    @property
    def save_steps(self) -> int | None:
        """`every` of `so.Checkpoints`."""
        return _steps(self.save_every, self.step_seconds)

    @property
    def snapshot_steps(self) -> int | None:
        """`memory_every` of `so.Checkpoints`."""
        return _steps(self.snapshot_every, self.step_seconds)

    def __str__(self) -> str:
        chips = plural(self.chips, "chip")
        groups = "" if self.islands == 1 else f" in {self.islands} islands"
        lines = [
            f"{chips}{groups}, {plural(self.spares, 'spare host')}: a failure every"
            f" {duration(self.interval)}"
        ]
        lines += [
            f"  {name} every {_period(seconds, steps)}"
            for name, seconds, steps in (
                ("checkpoint", self.save_every, self.save_steps),
                ("snapshot", self.snapshot_every, self.snapshot_steps),
            )
            if seconds is not None
        ]
        rows = [("goodput", self.goodput), *self.lost.items()]
        return "\n".join([*lines, *(f"  {name:<10}  {share:7.2%}" for name, share in rows)])


@calling("plan_recovery")
def plan_recovery(
    failures: Failures,
    *,
    chips: int,
    step_seconds: float | None = None,
    islands: int | None = None,
    spares: int | None = None,
    save_every: float | None = None,
    snapshot_every: float | None = None,
) -> Recovery:
    """Choose when to save, the spares and the islands, for the highest goodput.

    An argument that is given stays.

    Args:
      failures: how often chips fail, and the cost of a failure.
      chips: chips that train, without spares.
      step_seconds: seconds of a step. Periods are rounded to whole steps.
      islands: number of islands; by default the best of `failures.islands`.
      spares: number of spare hosts.
      save_every: seconds of training between two checkpoints.
      snapshot_every: seconds of training between two snapshots.

    Returns:
      A `Recovery`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, islands do not divide the chips, or a period is given
        without its cost.

    Example:
      >>> failures = Failures(mtbf=50_000 * 3600, restart=300, save=5)
      >>> recovery = plan_recovery(failures, chips=16_384, step_seconds=10)
      >>> recovery.save_steps, f"{recovery.goodput:.1%}"
      (33, '94.4%')
      >>> f"{plan_recovery(failures, chips=16_384, save_every=3600).goodput:.1%}"
      '82.1%'

    Note:
      **Failures** of a chip are exponential, and strike while the job trains or waits for a copy. A
      copy of the state (checkpoint or snapshot) that takes c seconds, every t seconds of training,
      has to be reached without a failure. With failures every m seconds that takes m (exp((t + c) /
      m) - 1) seconds on average, and exp((t + c) / m) - 1 failures. Each failure adds detect +
      restart, and replace with the probability that no spare waits, by the Erlang B formula. The
      best t solves (1 - t / m) exp((t + c) / m) = 1. For small c it is Young's sqrt(2 c m).

      **Two levels**: with snapshots, failures that leave the snapshots return to the newest one,
      and `wide` ones to the newest checkpoint. Islands return to the last exchange.

      **Islands** of n: each fails n times less often, and only its own chips wait, except for
      `stall`. What islands cost in loss, and what their exchanges cost, is not predicted.

      Nothing is fitted. `benchmarks/failure_simulation.py` plays the same events one by one.

    References:
      Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, "A higher
      order estimate of the optimum checkpoint interval for restart dumps", 2006.
    """
    check_count("chips", chips)
    for name, seconds in (
        ("step_seconds", step_seconds),
        ("save_every", save_every),
        ("snapshot_every", snapshot_every),
    ):
        if seconds is not None:
            check_number(name, seconds, positive=True)
    if spares is not None:
        check_count("spares", spares, minimum=0)
    if snapshot_every is not None and failures.snapshot is None:
        fix = "pass Failures(snapshot=...), the seconds that training waits for a snapshot."
        raise value_error("snapshot_every is given, but not what a snapshot costs.", fix=fix)
    counts = failures.islands if islands is None else (islands,)
    for count in counts:
        check_islands(count, chips)
    fixed = _Periods(save_every, snapshot_every)
    recoveries = [
        _IslandedJob(failures, chips, count, step_seconds).best(spares, fixed) for count in counts
    ]
    return max(recoveries, key=lambda recovery: recovery.goodput)


def check_islands(count: int, chips: int) -> None:
    """Raise an error unless a number of islands divides the chips."""
    check_count("islands", count)
    if chips % count:
        problem = f"{plural(chips, 'chip')} cannot be spread evenly over {plural(count, 'island')}."
        raise value_error(
            problem, fix=f"choose chips divisible by {count}, or another number of islands."
        )


def duration(seconds: float) -> str:
    """Return a duration such as `3.1 h`, `18 min` or `0.5 s`."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def best_period(cost: float, rate: float) -> float:
    """Return the seconds of work between two copies that cost `cost` seconds, with failures at
    `rate` per second.

    It solves (1 - x) exp(x + rate cost) = 1 for x = rate period, by bisection. x is below 1.
    """
    low = 0.0
    high = 1.0
    for _ in range(100):
        middle = (low + high) / 2
        # in logarithms: log(1 - x) + x + rate cost falls as x grows
        low, high = (
            (middle, high) if math.log1p(-middle) + middle + rate * cost > 0 else (low, middle)
        )
    return low / rate


class _Periods(NamedTuple):
    save: float | None
    snapshot: float | None


class _Narrow(NamedTuple):
    """For a second of steps that count: what failures cost that a copy in memory survives.

    Attributes:
      run: seconds that an island runs.
      snapshot: seconds of them that wait for snapshots.
      failures: failures of the island.
    """

    run: float
    snapshot: float
    failures: float


@dataclass(frozen=True)
class _IslandedJob:
    """A job with a number of islands; `step_seconds` is None if periods need not be whole steps."""

    failures: Failures
    chips: int
    islands: int
    step_seconds: float | None

    @property
    def rate(self) -> float:
        """Failures per second of all chips together."""
        return self.chips / self.failures.mtbf

    def best(self, spares: int | None, fixed: _Periods) -> Recovery:
        """Return the recovery with the number of spares that has the highest goodput, if `spares`
        is None.
        """
        periods = self.periods(fixed)
        if spares is not None:
            return self.recovery(spares, periods)
        best = self.recovery(0, periods)
        # each further spare helps less and costs the same
        while (with_one_more := self.recovery(best.spares + 1, periods)).goodput > best.goodput:
            best = with_one_more
        return best

    def wide(self, has_snapshots: bool) -> float:
        """Return the share of failures that only a checkpoint survives."""
        return self.failures.wide if self.islands > 1 or has_snapshots else 1.0

    def periods(self, fixed: _Periods) -> _Periods:
        """Return the best periods of copies, in whole steps, or the given ones."""
        snapshot = self.failures.snapshot if self.islands == 1 else None
        wide, (save_every, snapshot_every) = self.wide(snapshot is not None), fixed
        if snapshot is not None and snapshot_every is None:
            snapshot_every = _rounded(
                best_period(snapshot, max(1 - wide, 1e-12) * self.rate), self.step_seconds
            )
        if wide > 0 and save_every is None:
            run = self.narrow(wide, snapshot_every).run
            save_every = _rounded(
                best_period(self.failures.save, wide * self.rate) / run, self.step_seconds
            )
        return _Periods(save_every, snapshot_every)

    def narrow(self, wide: float, snapshot_every: float | None) -> _Narrow:
        """Return what failures cost that a copy in memory survives."""
        island_rate = (1 - wide) * self.rate / self.islands
        if self.islands > 1:
            period = self.failures.exchange
            wait = 0.0
        elif snapshot_every is not None and self.failures.snapshot is not None:
            period = snapshot_every
            wait = self.failures.snapshot
        else:
            return _Narrow(1.0, 0.0, 0.0)
        if period == 0:
            return _Narrow(1.0, 0.0, island_rate)
        run, count = _attempts(period + wait, island_rate)
        return _Narrow(run / period, _attempts(wait, island_rate)[0] / period, count / period)

    def recovery(self, spares: int, periods: _Periods) -> Recovery:
        """Return the recovery with these spares and periods.

        All sums are for `work` seconds of steps that count on one island, on average.
        """
        failures = self.failures
        islands = self.islands
        chips = self.chips
        has_snapshots = islands == 1 and periods.snapshot is not None
        wide = self.wide(has_snapshots)
        narrow = self.narrow(wide, periods.snapshot)
        wide_rate = wide * self.rate
        work = periods.save or 1.0
        checkpoint = failures.save if periods.save else 0.0
        one_try = work * narrow.run + checkpoint
        run, wide_failures = _attempts(one_try, wide_rate)
        narrow_failures = narrow.failures * work * run / one_try
        own_failures = narrow_failures + wide_failures
        # only tries that reach the checkpoint wait for it: on average as long as the write alone
        # would take
        saving = _attempts(checkpoint, wide_rate)[0]
        snapshots = (run - saving) * narrow.snapshot / narrow.run

        def times(replaced: float) -> tuple[float, float, float]:
            """Return the stall, all seconds, and the seconds between failures, if a share of
            failures finds no spare.
            """
            down = failures.detect + failures.restart + failures.replace * replaced
            others_up = run / (run + narrow_failures * max(down - failures.stall, 0.0))
            stall = failures.stall * (islands - 1) * narrow_failures * others_up
            total = run + stall + own_failures * down
            return stall, total, total / (islands * narrow_failures + wide_failures)

        replaced = 1.0
        for _ in range(50):  # a fixed point: fewer waits, more failures a day, more hosts away
            replaced = _erlang_b(spares, self.load(spares, times(replaced)[2], replaced))
        stall, total, interval = times(replaced)
        share = chips / (chips + spares * failures.host_chips)
        seconds = {
            "checkpoint": saving,
            "snapshot": snapshots,
            "redone": run - work - saving - snapshots,
            "detect": own_failures * failures.detect,
            "restart": own_failures * failures.restart,
            "replace": own_failures * failures.replace * replaced,
            "stall": stall,
        }
        lost = {cause: share * value / total for cause, value in seconds.items()} | {
            "spares": 1 - share
        }
        return Recovery(
            chips,
            islands,
            spares,
            periods.save,
            periods.snapshot if has_snapshots else None,
            self.step_seconds,
            interval,
            share * work / total,
            {cause: lost[cause] for cause in CAUSES if lost[cause] > 1e-12},
        )

    def load(self, spares: int, interval: float, replaced: float) -> float:
        """Return how many new hosts are on the way on average.

        A synchronous job that is down does not fail again. Each failure that uses up a spare makes
        it wait for `noticed` seconds. So another failure has that much less time to find no spare.
        """
        if self.islands > 1:
            return self.failures.replace / interval
        noticed = self.failures.detect + self.failures.restart
        running = interval - noticed - self.failures.replace * replaced
        return max(self.failures.replace - spares * noticed, 0.0) / running


def _attempts(seconds: float, rate: float) -> tuple[float, float]:
    """Return the mean seconds and failures until a piece of work is done, which each failure starts
    again.
    """
    if rate == 0:
        return seconds, 0.0
    count = math.expm1(min(rate * seconds, 500.0))
    return count / rate, count


def _erlang_b(servers: int, load: float) -> float:
    """Return the probability that all of `servers` spares are away, with `load` replacements on the
    way on average.
    """
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked


def _rounded(seconds: float, step_seconds: float | None) -> float:
    return seconds if step_seconds is None else max(1, round(seconds / step_seconds)) * step_seconds


def _steps(seconds: float | None, step_seconds: float | None) -> int | None:
    return (
        None if seconds is None or step_seconds is None else max(1, round(seconds / step_seconds))
    )


def _period(seconds: float, steps: int | None) -> str:
    return duration(seconds) if steps is None else f"{plural(steps, 'step')} ({duration(seconds)})"
