"""The server behind one lock: workers call it, from threads or other processes, and wait in its
calls.
"""

import threading
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import numpy as np

from shardopt.core import PyTree
from shardopt.parameter_server._run import AsyncRun, RunSnapshot, take_snapshot
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

    All calls wait on one condition variable, until one of three conditions is true:

    - the bound lets the worker start its step;
    - a milestone was taken away;
    - the run has ended.

    Every call names the worker's incarnation, the number of times that it was restarted. A call of
    an earlier incarnation, from before the worker was killed, has no effect, however late it
    arrives.

    Args:
      run: the server, new or restored.
      num_updates: the version to stop at; pushes that are in flight then are dropped.
      workers: the workers of the run.
      policy: which versions are milestones.
    """

    def __init__(
        self, run: AsyncRun, num_updates: int, workers: Collection[int], policy: SavePolicy
    ):
        self.run = run
        self.num_updates = num_updates
        self.policy = policy
        self.present: set[int] = set()  # workers that have joined and not left
        self.incarnations = dict.fromkeys(workers, 0)
        self.stop_reason: str | None = None
        # the end reason of a run that has reached `num_updates`
        self.completion_reason = "completed"
        self.running_workers = set(workers)  # workers whose thread or process has not ended
        self.milestones: list[Milestone] = []
        self.milestone_version = run.state.version  # the version of the last milestone
        # One condition for all: every wake-up checks its own predicate again, so none can be
        # missed.
        self.changed = threading.Condition()
        if not self.is_over():
            self._admit_first_workers()

    def enter(self, worker: int, incarnation: int = 0) -> int | None:
        """Let a worker join, unless it is present.

        Return its position in its data, or None if it must end.
        """
        with self.changed:
            if self.must_end(worker, incarnation):
                return None
            if worker not in self.present:
                self._join(worker)
            self.changed.notify_all()
            return self.run.positions[worker]

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """Wait until the worker may start its next step; return None if it must not.

        A worker without data leaves.
        """
        # Before the lock: waiting for the lock counts as waiting.
        asked_at = self.run.now()
        with self.changed:
            self.changed.wait_for(
                lambda: self.must_end(worker, incarnation) or self.run.may_pull(worker) or not ready
            )
            if self.must_end(worker, incarnation):
                return None
            if not ready:
                self._leave(worker, asked_at)
                return None
            event = self.run.pull(worker, asked_at)
            return WorkerTask(event.version, event.clock, self.run.state.params)

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """Take the result of a step; return False if the worker must stop."""
        with self.changed:
            if self.must_end(worker, incarnation):
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
            # From here on late calls of the killed process are told to end, before the new one
            # joins.
            self.incarnations[worker] += 1
            if worker in self.present:
                self._leave(worker)
            if not restarting:
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
                # Pushes of an open clock were taken, so one more update is due.
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
        """Let the workers join in order, so that the log does not depend on the speed of their
        threads.
        """
        present = self.run.state.clock.steps
        for worker in sorted(set(present) - self.running_workers):
            # it worked when the checkpoint was saved, and is not part of this run
            self.run.leave(worker)
        for worker in sorted(self.running_workers):
            if worker in present:
                self.run.resume(worker)
                self.present.add(worker)
            else:
                self._join(worker)

    def _join(self, worker: int) -> None:
        self.run.join(worker)
        self.present.add(worker)

    def _leave(self, worker: int, asked_at: float | None = None) -> None:
        previous_version = self.run.state.version
        self.run.leave(worker, asked_at)
        self.present.remove(worker)
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
            # Under the lock, right after the update: later, another push would have changed the
            # state.
            snapshot = take_snapshot(self.run) if saves else None
            self.milestones.append(Milestone(version, self.run.state.params, history, snapshot))
        self.changed.notify_all()
