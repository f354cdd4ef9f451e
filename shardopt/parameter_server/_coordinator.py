"""The server behind one lock: workers call it, from threads or other processes, and wait in its
calls.
"""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from shardopt.core import PyTree
from shardopt.parameter_server._run import AsyncRun, Availability, RunSnapshot, take_snapshot
from shardopt.parameter_server._updates import Update
from shardopt.parameter_server._views import Status


class WorkerTask(NamedTuple):
    """The next step of a worker, the answer to its pull.

    Attributes:
      version: the version of the parameters.
      clock: the worker's clock, the number of this step.
      params: the parameters.
    """

    version: int
    clock: int
    params: PyTree


class Milestone(NamedTuple):
    """A copy of the server right after an update whose version must be saved or evaluated.

    Attributes:
      version: updates made.
      params: the parameters after this update.
      history: the metrics of the updates since the previous milestone.
      snapshot: the run, if it must be saved.
    """

    version: int
    params: PyTree
    history: list[Mapping[str, jax.Array | np.ndarray]]
    snapshot: RunSnapshot | None


class SavePolicy(NamedTuple):
    """The numbers of updates between two saves, and between two evaluations; None for never."""

    save_every: int | None = None
    evaluate_every: int | None = None

    def saves(self, version: int) -> bool:
        """Return whether this version becomes a checkpoint."""
        return self.save_every is not None and version % self.save_every == 0

    def evaluates(self, version: int) -> bool:
        """Return whether this version is evaluated."""
        return self.evaluate_every is not None and version % self.evaluate_every == 0


class Coordinator:
    """Lets workers enter, pull, push and leave: each call blocks until it may proceed, or tells
    that the run has ended.

    All calls wait on one condition variable, until one of four conditions is true:

    - the bound lets the worker start its step;
    - the worker is due to join;
    - a milestone was taken away;
    - the run has ended.

    Every call names the worker's incarnation, the number of times that it was restarted. A call of
    an earlier incarnation, from before the worker was killed, has no effect, however late it
    arrives.

    Args:
      run: the server, new or restored.
      num_updates: the version to stop at; pushes that are in flight then are dropped.
      availability: the periods of each worker. At the end of a period the worker dies, and its step
        is lost.
      policy: which versions are milestones.
    """

    def __init__(
        self, run: AsyncRun, num_updates: int, availability: Availability, policy: SavePolicy
    ):
        self.run = run
        self.num_updates = num_updates
        self.policy = policy
        # worker -> the version at which its current period ends
        self.period_ends: dict[int, float] = {}
        self.incarnations = dict.fromkeys(availability, 0)
        self.restarting: set[int] = set()  # workers that were killed and will join again
        self.stop_reason: str | None = None
        # the end reason of a run that has reached `num_updates`
        self.completion_reason = "completed"
        self.running_workers = set(availability)  # workers whose thread or process has not ended
        self.milestones: list[Milestone] = []
        self.milestone_version = run.state.version  # the version of the last milestone
        self.changed = threading.Condition()
        version = run.state.version
        self.periods = {  # worker -> its periods that have not begun yet
            worker: [(start, end) for start, end in periods if end > version]
            for worker, periods in availability.items()
        }
        if not self.is_over():
            self._admit_first_workers()

    def enter(self, worker: int, incarnation: int = 0) -> int | None:
        """Wait until the worker's period begins.

        Return its position in its data, or None if no period is left.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.must_end(worker, incarnation)
                    or worker in self.period_ends
                    or self._is_due(worker)
                    or self._is_stuck()
                )
            )
            if self.must_end(worker, incarnation) or not (
                worker in self.period_ends or self._join_if_due(worker)
            ):
                self.changed.notify_all()
                return None
            self.changed.notify_all()
            return self.run.positions[worker]

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """Wait until the worker may start its next step; return None if it must not.

        A worker without data leaves.
        """
        asked_at = self.run.now()
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.must_end(worker, incarnation)
                    or self._period_is_over(worker)
                    or self.run.may_pull(worker)
                    or not ready
                )
            )
            if self.must_end(worker, incarnation):
                return None
            if not ready or self._period_is_over(worker):
                self._leave(worker, asked_at)
                return None
            event = self.run.pull(worker, asked_at)
            return WorkerTask(event.version, event.clock, self.run.state.params)

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """Take the result of a step; return False if the worker must stop."""
        with self.changed:
            if self.must_end(worker, incarnation):
                return False
            if self._period_is_over(worker):
                self._leave(worker)
                return False
            previous_version = self.run.state.version
            self.run.push(worker, update, version)
            self._notify_change(previous_version)
            # Milestones are copies and need memory: a worker waits if they are made faster than
            # they are taken away.
            self.changed.wait_for(
                lambda: len(self.milestones) < 2 or self.must_end(worker, incarnation)
            )
            return not self.must_end(worker, incarnation)

    def worker_died(self, worker: int, *, restarting: bool = False) -> None:
        """Remove a worker that was killed.

        With `restarting` it will join again, in its next incarnation.
        """
        with self.changed:
            self.incarnations[worker] += 1
            if worker in self.period_ends:
                if restarting:
                    self.periods[worker].insert(
                        0, (self.run.state.version, self.period_ends[worker])
                    )
                self._leave(worker)
            if restarting:
                self.restarting.add(worker)
            else:
                self.periods[worker] = []
                self.running_workers.discard(worker)
            self.changed.notify_all()

    def worker_ended(self, worker: int) -> None:
        """Record that a worker's thread or process has ended."""
        with self.changed:
            self.running_workers.discard(worker)
            self.changed.notify_all()

    def stop(self, reason: str) -> None:
        """End every worker at its next call."""
        with self.changed:
            self.stop_reason = self.stop_reason or reason
            self.changed.notify_all()

    def finish_early(self) -> None:
        """End the run now, or with max_staleness=0 at the end of the open clock: no push that was
        taken is lost.
        """
        with self.changed:
            if not self.is_over():
                self.num_updates = self.run.state.version + bool(self.run.state.waiting)
                self.completion_reason = "early"
            self.changed.notify_all()

    def next_milestone(self, timeout: float | None = None) -> Milestone | None:
        """Wait for the next milestone and take it away.

        Return None at the timeout, or when all workers have ended.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.milestones or not self.running_workers, timeout)
            milestone = self.milestones.pop(0) if self.milestones else None
            self.changed.notify_all()
            return milestone

    def status(self) -> Status:
        """Return the current activity of every worker."""
        with self.changed:
            return self.run.status(self.num_updates)

    def is_over(self) -> bool:
        """Return whether every worker must end."""
        return self.stop_reason is not None or self.run.state.version >= self.num_updates

    def must_end(self, worker: int, incarnation: int) -> bool:
        """Return whether this incarnation of a worker must end: the run is over, or the worker was
        restarted.
        """
        return self.is_over() or incarnation != self.incarnations[worker]

    def end_reason(self) -> str:
        """Return how the run ended, as `metrics["stopped"]` of the result."""
        return self.stop_reason or (
            self.completion_reason if self.run.state.version >= self.num_updates else "exhausted"
        )

    def _admit_first_workers(self) -> None:
        """Let the workers that are due join in order, so that the log does not depend on the speed
        of their threads.
        """
        for worker in sorted(set(self.run.state.clock.steps) - set(self.periods)):
            # it worked when the checkpoint was saved, and is not part of this run
            self.run.leave(worker)
        for worker in sorted(self.periods):
            if worker in self.run.state.clock.steps:
                self.run.resume(worker)
                self.period_ends[worker] = (
                    self.periods[worker].pop(0)[1]
                    if self._is_due(worker)
                    else self.run.state.version
                )
            else:
                self._join_if_due(worker)

    def _join_if_due(self, worker: int) -> bool:
        if not self._is_due(worker):
            return False
        self.run.join(worker)
        self.period_ends[worker] = self.periods[worker].pop(0)[1]
        self.restarting.discard(worker)
        return True

    def _leave(self, worker: int, asked_at: float | None = None) -> None:
        previous_version = self.run.state.version
        self.run.leave(worker, asked_at)
        del self.period_ends[worker]
        self._notify_change(previous_version)

    def _notify_change(self, previous_version: int) -> None:
        """Wake all waiting calls.

        Make a milestone if the version is new and the policy asks for one.
        """
        version = self.run.state.version
        saves = self.policy.saves(version)
        if version > previous_version and (saves or self.policy.evaluates(version)):
            history = self.run.history(self.milestone_version)
            self.milestone_version = version
            snapshot = take_snapshot(self.run) if saves else None
            self.milestones.append(Milestone(version, self.run.state.params, history, snapshot))
        self.changed.notify_all()

    def _is_due(self, worker: int) -> bool:
        """Return whether the worker's next period has begun."""
        periods = self.periods[worker]
        return (
            bool(periods)
            and worker not in self.period_ends
            and periods[0][0] <= self.run.state.version
        )

    def _period_is_over(self, worker: int) -> bool:
        """Return whether the worker's current period has ended."""
        return self.run.state.version >= self.period_ends[worker]

    def _is_stuck(self) -> bool:
        """Return whether no worker is present or due, so that no new version will ever come."""
        return (
            not self.period_ends
            and not self.restarting
            and not any(self._is_due(worker) for worker in self.periods)
        )
