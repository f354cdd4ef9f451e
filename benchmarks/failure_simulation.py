"""A job with failures in virtual time, one event after another: the same rules as `plan_recovery`,
without formulas.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from recovery_plan import CAUSES, Failures, Recovery

from shardopt.core._arguments import check_count
from shardopt.core._errors import calling


@calling("simulate_failures")
def simulate_failures(
    failures: Failures, recovery: Recovery, *, num_failures: int = 1000, seed: int = 0
) -> Recovery:
    """Play a job with random failures in virtual time, and return its goodput and the lost time by
    cause.

    Args:
      failures: how often chips fail, and the cost of a failure.
      recovery: the chips, islands, spares and periods, as `plan_recovery` chose them.
      num_failures: failures until the simulation ends.
      seed: the seed of the failures.

    Returns:
      The same `Recovery`, with the `interval`, `goodput` and `lost` of this run.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range.

    Example:
      >>> from recovery_plan import Failures, plan_recovery
      >>> failures = Failures(mtbf=1000 * 3600, restart=300, save=5)
      >>> predicted = plan_recovery(failures, chips=512)
      >>> simulated = simulate_failures(failures, predicted)
      >>> f"{predicted.goodput:.2f} {simulated.goodput:.2f}"
      '0.92 0.92'

    Note:
      The events are failures of islands, the ends of `detect`, `replace` and `restart`, the arrival
      of spares, and the copies of the state. `plan_recovery` has the averages of these events in
      closed form; tests compare the two.
    """
    check_count("num_failures", num_failures)
    check_count("seed", seed, minimum=0)
    return _Simulation(failures, recovery, np.random.default_rng(seed)).run(num_failures)


@dataclass
class _Island:
    """One island.

    Attributes:
      until_failure: seconds of running until its next failure.
      since_copy: seconds of work since the copy in memory that it can return to.
      since_save: seconds of work since the checkpoint.
      phases: while it is down, the cause and the end of each phase of its restart; empty while it
        is up.
    """

    until_failure: float
    since_copy: float = 0.0
    since_save: float = 0.0
    phases: list[tuple[str, float]] = field(default_factory=list)

    def lose(self, seconds: float) -> float:
        """Return to a copy that is `seconds` of work old."""
        self.since_copy = 0.0
        self.since_save -= seconds
        return seconds


class _Simulation:
    def __init__(self, failures: Failures, recovery: Recovery, generator: np.random.Generator):
        self.failures = failures
        self.recovery = recovery
        self.generator = generator
        self.mean = failures.mtbf / recovery.chips * recovery.islands  # of one island
        self.islands = [_Island(self._draw()) for _ in range(recovery.islands)]
        self.has_snapshots = recovery.snapshot_every is not None
        self.copy_every = recovery.snapshot_every or math.inf
        if recovery.islands > 1:
            self.copy_every = failures.exchange or math.inf
        self.save_every = recovery.save_every or math.inf
        self.until_copy = self.copy_every
        self.until_save = self.save_every
        self.now = 0.0
        self.num_failures = 0
        self.useful = 0.0
        self.lost = dict.fromkeys(CAUSES, 0.0)
        self.wait: tuple[str, float] | None = None  # the cause and the end of a wait of all islands
        self.spares = recovery.spares
        self.arrivals: list[float] = []  # of new spares

    def run(self, num_failures: int) -> Recovery:
        while self.num_failures < num_failures:
            self._advance(self._next_event())
            self._handle()
        islands = self.recovery.islands
        spare_chips = self.recovery.spares * self.failures.host_chips
        share = self.recovery.chips / (self.recovery.chips + spare_chips)
        lost = {
            cause: share * seconds / (islands * self.now) for cause, seconds in self.lost.items()
        }
        lost["spares"] = 1 - share
        return self.recovery._replace(
            interval=self.now / self.num_failures,
            goodput=share * self.useful / (islands * self.now),
            lost={cause: value for cause, value in lost.items() if value > 1e-12},
        )

    def _draw(self) -> float:
        return float(self.generator.exponential(self.mean))

    def _stalled(self) -> bool:
        return self.wait is not None and self.wait[0] == "stall"

    def _next_event(self) -> float:
        """Return the seconds until something happens."""
        up = [island for island in self.islands if not island.phases]
        times = [island.phases[0][1] - self.now for island in self.islands if island.phases]
        times += [self.wait[1] - self.now] if self.wait else []
        times += [self.arrivals[0] - self.now] if self.arrivals else []
        if up and not self._stalled():
            times += [island.until_failure for island in up]
        if up and self.wait is None:
            times += [self.until_copy, self.until_save]
        return max(min(times), 0.0)

    def _advance(self, seconds: float) -> None:
        """Let time pass, and count the seconds of each island by their use."""
        self.now += seconds
        for island in self.islands:
            if island.phases:
                self.lost[island.phases[0][0]] += seconds
                continue
            if not self._stalled():
                island.until_failure -= seconds
            if self.wait is not None:
                self.lost[self.wait[0]] += seconds
            else:
                self.useful += seconds
                island.since_copy += seconds
                island.since_save += seconds
        if self.wait is None and any(not island.phases for island in self.islands):
            self.until_copy -= seconds
            self.until_save -= seconds

    def _handle(self) -> None:
        """Process the event that is due, one at a time."""
        tiny = 1e-9 * max(self.now, 1.0)
        while self.arrivals and self.arrivals[0] <= self.now + tiny:
            heapq.heappop(self.arrivals)
            self.spares += 1
        for island in self.islands:
            if island.phases and island.phases[0][1] <= self.now + tiny:
                island.phases.pop(0)
                if not island.phases:
                    island.until_failure = self._draw()
                    island.since_copy = 0.0
                return
        if not self._stalled():
            for island in self.islands:
                if not island.phases and island.until_failure <= tiny:
                    self._fail(island)
                    return
        if self.wait is not None:
            if self.wait[1] <= self.now + tiny:
                self._copied(self.wait[0])
            return
        if self.until_copy <= tiny:
            if self.has_snapshots and self.failures.snapshot is not None:
                self.wait = "snapshot", self.now + self.failures.snapshot
            else:
                self._copied("exchange")
        elif self.until_save <= tiny:
            self.wait = "checkpoint", self.now + self.failures.save

    def _copied(self, cause: str) -> None:
        """Finish a copy of the state, or a stall."""
        self.wait = None
        if cause == "checkpoint":
            self.until_save = self.save_every
            for island in self.islands:
                island.since_save = 0.0
        elif cause != "stall":
            self.until_copy = self.copy_every
            for island in self.islands:
                island.since_copy = 0.0

    def _fail(self, island: _Island) -> None:
        """One island fails, or all of them if no copy in memory survives."""
        self.num_failures += 1
        in_memory = len(self.islands) > 1 or self.has_snapshots
        is_wide = not in_memory or self.generator.random() < self.failures.wide
        phases = [("detect", self.failures.detect), ("restart", self.failures.restart)]
        if self.spares:
            self.spares -= 1
            heapq.heappush(self.arrivals, self.now + self.failures.replace)
        else:
            phases.insert(1, ("replace", self.failures.replace))
        failed = self.islands if is_wide else [island]
        for member in failed:
            redone = member.lose(member.since_save if is_wide else self._since_copy(member))
            self.useful -= redone
            self.lost["redone"] += redone
            end = self.now
            member.phases = []
            for cause, seconds in phases:
                end += seconds
                member.phases.append((cause, end))
        if is_wide or len(self.islands) == 1:
            self.wait = None
            self.until_copy = self.copy_every
            self.until_save = self.save_every - self.islands[0].since_save
        elif self.failures.stall:
            self.wait = "stall", self.now + self.failures.stall

    def _since_copy(self, island: _Island) -> float:
        """Return the work that a failure loses, if a copy in memory survives."""
        return 0.0 if len(self.islands) > 1 and not self.failures.exchange else island.since_copy
