"""A server at work: the one thing here that changes. Whatever drives it, threads or a simulation, drives this."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.core.types import PyTree
from shardopt.parameter_server.log import Event, Log, Positions
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.state import ServerState
from shardopt.parameter_server.updates import digest
from shardopt.parameter_server.views import Status, WorkerStats, summarize

_UNDER_WAY = 128
"""More updates than are ever on their way through the device at once."""


class AsyncResult(NamedTuple):
    """How an asynchronous run ended.

    Attributes:
      params: the parameters on the server; None from a simulation of time only.
      log: the event log, for `parameter_server.replay` and `Log.save`.
      metrics: what `parameter_server.summarize(log)` says of the run: rates, histograms of staleness (clocks) and
        delay (versions), seconds that each worker waited; "stopped", which is "completed" (num_updates reached),
        "exhausted" (no worker is left, or the data is at its end), "early" (by early stopping) or "until" (of a
        simulation); "push_bytes", of the gradients that were pushed since the run last began, as they were encoded; with a
        reducer that remembers, "unsent" {worker: what its error memory holds} and "lost_memory" {worker: [what it held
        each time that the worker left or was resumed]}, in norms of the gradient that it pushed last; and "history",
        the loss and aux metrics of every update as arrays [updates].
    """

    params: PyTree
    log: Log
    metrics: dict[str, Any]


class Run:
    """A server, its state, and its log. Not thread-safe: whoever shares it holds a lock.

    Attributes:
      state: the present `ServerState`.
      log: what has happened so far.
      now: `now() -> seconds` since the run began.
    """

    def __init__(self, server: Server, params: PyTree, header: Mapping[str, Any], now: Callable[[], float]):
        self.server, self.now = server, now
        self.state: ServerState = server.init(params)
        self.log = Log(
            {
                "max_staleness": server.max_staleness,
                "rule": {"name": server.rule.name, "config": dict(server.rule.config)},
                "nonfinite": server.nonfinite,
                **header,
                "initial": None if params is None else digest(self.state.params),
                "final": None,
            }
        )
        self.positions, self.tally = Positions(), WorkerStats()
        self.push_bytes = 0
        self.unsent: dict[int, Any] = {}  # what the error memory of each worker holds
        self.lost_memory: dict[int, list[float]] = {}
        self._history: list[Mapping[str, Any]] = []  # numbers, once they are old enough to be known
        self._recent: list[Mapping[str, Any]] = []

    def restore(
        self, state: ServerState, log: Log, history: Sequence[Mapping[str, Any]], unsent: Mapping[int, Any] = {}
    ) -> None:
        """Go on from where an earlier run was; its times are counted on from."""
        self.unsent, self.lost_memory = dict(unsent), {}
        began, clock = log[len(log) - 1].time if len(log) else 0.0, self.now
        start = clock()
        self.now = lambda: began + clock() - start
        self.state, self.log, self.positions, self.tally = state, log, Positions(log), WorkerStats(log)
        self._history, self._recent = list(history), []

    def join(self, worker: int) -> Event:
        """Let a worker in."""
        return self._record(*self.server.join(self.state, worker))

    def may_pull(self, worker: int) -> bool:
        """Say whether a worker may start its next step now."""
        return self.server.may_pull(self.state, worker)

    def pull(self, worker: int, asked: float) -> Event:
        """Begin a step that the worker asked for at this time; the parameters are `state.params`."""
        return self._record(*self.server.pull(self.state, worker), asked)

    def push(self, worker: int, update: Any, pulled_version: int) -> Event:
        """Take the result of a step."""
        event = self._record(*self.server.push(self.state, worker, update, pulled_version))
        if update is not None:
            self.push_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(update.grads))
            if update.unsent is not None:
                self.unsent[worker] = update.unsent
        return event

    def leave(self, worker: int, asked: float | None = None) -> Event:
        """Let a worker go; `asked` is since when it has been waiting for a step, if it has."""
        self._forget(worker)
        return self._record(*self.server.leave(self.state, worker), asked)

    def resume(self, worker: int) -> Event:
        """Let a worker go on after a `restore`."""
        self._forget(worker)
        return self._record(*self.server.resume(self.state, worker))

    def status(self, num_updates: int) -> Status:
        """Return who is doing what."""
        now = self.now()
        workers = self.tally.workers(now, lambda worker: not self.may_pull(worker))
        return Status(now, self.state.version, num_updates, workers)

    def history(self, since: int = 0) -> list[Mapping[str, Any]]:
        """Return the metrics of each update from version `since` on; the latest may still be under way."""
        old = len(self._history)
        return self._history[since:] + self._recent[max(0, since - old) :]

    def finish(self, stopped: str, **more: Any) -> AsyncResult:
        """Return the result, once nobody works any more, with `more` metrics."""
        params = self.state.params
        if params is not None:
            params = jax.block_until_ready(params)
            self.log.header["final"] = digest(params)
        rows = self._history + jax.device_get(self._recent)
        history = {name: np.asarray([one[name] for one in rows]) for name in (rows[0] if rows else ())}
        metrics = {**summarize(self.log), "stopped": stopped, "push_bytes": self.push_bytes, "history": history, **more}
        if self.server.reducer is not None:
            metrics["unsent"] = {worker: float(value) for worker, value in sorted(self.unsent.items())}
            metrics["lost_memory"] = dict(sorted(self.lost_memory.items()))
        return AsyncResult(params, self.log, metrics)

    def _forget(self, worker: int) -> None:
        """A worker's error memory is gone: whoever joins or goes on begins without."""
        if worker in self.unsent:
            self.lost_memory.setdefault(worker, []).append(float(self.unsent.pop(worker)))

    def _record(self, state: ServerState, event: Event, asked: float | None = None) -> Event:
        if state.version > self.state.version and state.metrics:
            self._recent.append(state.metrics)
            if len(self._recent) == 2 * _UNDER_WAY:  # waits for nothing that is still under way
                self._history += jax.device_get(self._recent[:_UNDER_WAY])
                del self._recent[:_UNDER_WAY]
        now = self.now()
        event = event._replace(time=now, waited=0.0 if asked is None else now - asked)
        self.state = state
        self.log.append(event)
        self.positions.record(event)
        self.tally.record(event)
        return event
