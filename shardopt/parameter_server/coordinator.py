"""The server behind one lock: where workers come, in threads or from other processes, and wait."""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from shardopt.core.types import PyTree
from shardopt.parameter_server.run import Availability, Run, Snapshot, snapshot
from shardopt.parameter_server.updates import Update
from shardopt.parameter_server.views import Status


class Task(NamedTuple):
    """A step to do: the version of the parameters, the worker's clock, the parameters."""

    version: int
    clock: int
    params: PyTree


class Milestone(NamedTuple):
    """The server as it was right after an update that was to be saved or evaluated.

    Attributes:
      version: updates made.
      params: the parameters then.
      history: the metrics of the updates since the milestone before.
      snapshot: the run, where it is to be saved.
    """

    version: int
    params: PyTree
    history: list[Mapping[str, jax.Array | np.ndarray]]
    snapshot: Snapshot | None


class SavePolicy(NamedTuple):
    """After how many updates each a run is saved and evaluated; None for never."""

    save_every: int | None = None
    evaluate_every: int | None = None

    def saves(self, version: int) -> bool:
        """Whether this version becomes a checkpoint."""
        return self.save_every is not None and version % self.save_every == 0

    def evaluates(self, version: int) -> bool:
        """Whether this version is evaluated."""
        return self.evaluate_every is not None and version % self.evaluate_every == 0


class Coordinator:
    """Workers enter, pull, push and are let go; each call waits until it may be done, or says that all is over.

    They wait in one place only, a condition variable, for one of few things to come true: the bound lets them start,
    they are due to join, a milestone was taken away, or all is over. Every call names the worker's incarnation, how
    often it was started again: what it asked for before it was killed comes to nothing, however late it arrives.

    Args:
      run: the server, new or restored.
      num_updates: the version to stop at; pushes in flight then are dropped.
      availability: when each worker is there. At the end of a period it dies with what it computes.
      policy: which versions are milestones.
    """

    def __init__(self, run: Run, num_updates: int, availability: Availability, policy: SavePolicy):
        self.run, self.num_updates, self.policy = run, num_updates, policy
        self.until: dict[int, float] = {}  # present periods: when they end
        self.incarnations = dict.fromkeys(availability, 0)
        self.expected: set[int] = set()  # killed, and to be there again soon
        self.stopped: str | None = None
        self.verdict = "completed"  # what a run is that came to `num_updates`
        self.working = set(availability)  # whose thread or process has not ended
        self.milestones: list[Milestone] = []
        self.seen = run.state.version
        self.changed = threading.Condition()
        version = run.state.version
        self.periods = {  # those not begun yet
            worker: [(start, end) for start, end in periods if end > version]
            for worker, periods in availability.items()
        }
        if not self.over():
            self._open()

    def enter(self, worker: int, incarnation: int = 0) -> int | None:
        """Wait until the worker is there; return how far it is in its data, or None if it never will be again."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.gone(worker, incarnation) or worker in self.until or self._due(worker) or self._stuck()
            )
            if self.gone(worker, incarnation) or not (worker in self.until or self._join_if_due(worker)):
                self.changed.notify_all()
                return None
            self.changed.notify_all()
            return self.run.positions.of(worker)

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """Begin a step as `begin_step`, and return the parameters as users know them."""
        task = self.begin_step(worker, incarnation, ready)
        if task is None or self.run.server.servers == 1:
            return task
        return task._replace(params=self.run.server.whole(task.params))

    def begin_step(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """Wait until the worker may start its next step; None if it is not to. One not ready, without data, leaves."""
        asked = self.run.now()
        with self.changed:
            self.changed.wait_for(
                lambda: self.gone(worker, incarnation) or self._dead(worker) or self.run.may_pull(worker) or not ready
            )
            if self.gone(worker, incarnation):
                return None
            if not ready or self._dead(worker):
                self._leave(worker, asked)
                return None
            event = self.run.pull(worker, asked)
            return Task(event.version, event.clock, self.run.state.params)

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """Take the result of a step; False if the worker is to stop."""
        with self.changed:
            if self.gone(worker, incarnation):
                return False
            if self._dead(worker):
                self._leave(worker)
                return False
            before = self.run.state.version
            self.run.push(worker, update, version)
            self._after(before)
            # Milestones are copies: whoever makes them faster than they are taken away waits.
            self.changed.wait_for(lambda: len(self.milestones) < 2 or self.gone(worker, incarnation))
            return not self.gone(worker, incarnation)

    def worker_died(self, worker: int, *, expected: bool = False) -> None:
        """Forget a worker that was killed; `expected` if it will be there again, in its next incarnation."""
        with self.changed:
            self.incarnations[worker] += 1
            if worker in self.until:
                if expected:
                    self.periods[worker].insert(0, (self.run.state.version, self.until[worker]))
                self._leave(worker)
            if expected:
                self.expected.add(worker)
            else:
                self.periods[worker] = []
                self.working.discard(worker)
            self.changed.notify_all()

    def done(self, worker: int) -> None:
        """Take note that a worker's thread or process has ended."""
        with self.changed:
            self.working.discard(worker)
            self.changed.notify_all()

    def stop(self, why: str) -> None:
        """Let every worker end at the next chance."""
        with self.changed:
            self.stopped = self.stopped or why
            self.changed.notify_all()

    def finish_early(self) -> None:
        """Let the run end now, or with max_staleness=0 with the clock that is open: no push that was taken is lost."""
        with self.changed:
            if not self.over():
                self.num_updates = self.run.state.version + bool(self.run.state.waiting)
                self.verdict = "early"
            self.changed.notify_all()

    def milestone(self, timeout: float | None = None) -> Milestone | None:
        """Wait for the next milestone and take it away; None when the time is up, or nobody works any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.milestones or not self.working, timeout)
            found = self.milestones.pop(0) if self.milestones else None
            self.changed.notify_all()
            return found

    def status(self) -> Status:
        """Return who is doing what."""
        with self.changed:
            return self.run.status(self.num_updates)

    def over(self) -> bool:
        """Whether every worker is to end."""
        return self.stopped is not None or self.run.state.version >= self.num_updates

    def gone(self, worker: int, incarnation: int) -> bool:
        """Whether nothing more is to be done for a worker in this incarnation."""
        return self.over() or incarnation != self.incarnations[worker]

    def why(self) -> str:
        """Say how the run ended."""
        return self.stopped or (self.verdict if self.run.state.version >= self.num_updates else "exhausted")

    def _open(self) -> None:
        """Let in who is due, in order, before anyone is fast enough to matter."""
        for worker in sorted(set(self.run.state.clock.steps) - set(self.periods)):
            self.run.leave(worker)  # there at the checkpoint, and not any more
        for worker in sorted(self.periods):
            if worker in self.run.state.clock.steps:
                self.run.resume(worker)
                self.until[worker] = self.periods[worker].pop(0)[1] if self._due(worker) else self.run.state.version
            else:
                self._join_if_due(worker)

    def _join_if_due(self, worker: int) -> bool:
        if not self._due(worker):
            return False
        self.run.join(worker)
        self.until[worker] = self.periods[worker].pop(0)[1]
        self.expected.discard(worker)
        return True

    def _leave(self, worker: int, asked: float | None = None) -> None:
        before = self.run.state.version
        self.run.leave(worker, asked)
        del self.until[worker]
        self._after(before)

    def _after(self, before: int) -> None:
        """Whoever waits looks again; a new version may be a milestone."""
        version = self.run.state.version
        saves = self.policy.saves(version)
        if version > before and (saves or self.policy.evaluates(version)):
            history, self.seen = self.run.history(self.seen), version
            kept = snapshot(self.run) if saves else None
            self.milestones.append(Milestone(version, self.run.params, history, kept))
        self.changed.notify_all()

    def _due(self, worker: int) -> bool:
        """Whether the worker's next period has come."""
        periods = self.periods[worker]
        return bool(periods) and worker not in self.until and periods[0][0] <= self.run.state.version

    def _dead(self, worker: int) -> bool:
        """Whether the worker's present period is at its end."""
        return self.run.state.version >= self.until[worker]

    def _stuck(self) -> bool:
        """Whether nobody is there and nobody is due: no version will ever come for which others wait."""
        return not self.until and not self.expected and not any(self._due(worker) for worker in self.periods)
