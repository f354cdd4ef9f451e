"""The event queue of a simulation."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardopt.core.types import PyTree
from shardopt.parameter_server.compute import Compute
from shardopt.parameter_server.durations import seconds_of
from shardopt.parameter_server.run import Run
from shardopt.parameter_server.simulated_worker import SimulatedWorker

_JOIN, _ARRIVE, _PUSH, _DIE = range(4)


class Step(NamedTuple):
    """A step under way: its batch, and the parameters it started from."""

    version: int
    clock: int
    params: PyTree
    batch: Any


class Play:
    """A simulation under way: a queue of events in virtual time, and the server they go to."""

    def __init__(
        self,
        specs: Sequence[SimulatedWorker],
        transfers: Sequence[tuple[float, float]],
        make_run: Callable[[Callable[[], float]], Run],
        compute: Compute,
        server_seconds: float,
        seed: int,
    ):
        self.now, self.specs, self.transfers = 0.0, specs, transfers
        self.compute, self.server_seconds = compute, server_seconds
        self.run = make_run(lambda: self.now)
        self.draws = [np.random.default_rng([seed, worker]) for worker in range(len(specs))]
        self.lives = [0] * len(specs)  # counts deaths: messages of an earlier life are lost
        self.steps: dict[int, Step] = {}
        self.asking: dict[int, float] = {}  # who waits for the bound, in the order of asking, and since when
        self.free_at = 0.0
        self.count = 0
        self.queue: list[tuple[float, int, int, int, int]] = []
        for worker, spec in enumerate(specs):
            for start, end in spec.presence:
                self.schedule(start, _JOIN, worker, 0)
                if end < math.inf:
                    self.schedule(end, _DIE, worker, 0)

    def schedule(self, time: float, what: int, worker: int, life: int) -> None:
        """Put an event into the queue; of equal times, the first one put comes first."""
        heapq.heappush(self.queue, (time, self.count, what, worker, life))
        self.count += 1

    def until(self, num_updates: int | None, end: float) -> str:
        """Play until enough updates have been made, or the time has come, or nothing is left; say which."""
        while num_updates is None or self.run.state.version < num_updates:
            if not self.queue:
                return "exhausted"
            time, _, what, worker, life = heapq.heappop(self.queue)
            if time > end:
                return "until"
            self.now = time
            slowest = self.run.state.clock.slowest
            if what == _JOIN:
                self.run.join(worker)
                self.compute.begin(worker, 0)
                self.asking[worker] = self.now
                self.ask(worker)
            elif what == _DIE:
                if worker in self.run.state.clock.steps:
                    self.drop(worker)
            elif life == self.lives[worker] and what == _ARRIVE:
                self.free_at = max(time, self.free_at) + self.server_seconds
                self.schedule(self.free_at, _PUSH, worker, life)
            elif life == self.lives[worker]:
                self.push(worker)
            while self.run.state.clock.slowest > slowest:
                slowest = self.run.state.clock.slowest
                for waiting in list(self.asking):
                    self.ask(waiting)
        return "completed"

    def ask(self, worker: int) -> None:
        """Start a worker's next step if it may."""
        if not self.run.may_pull(worker):
            return
        batch = self.compute.next_batch(worker)
        if batch is None:
            self.drop(worker)
            return
        event = self.run.pull(worker, self.asking.pop(worker))
        self.steps[worker] = Step(event.version, event.clock, self.run.state.params, batch)
        compute = seconds_of(self.specs[worker].step_seconds, self.draws[worker])
        pull, push = self.transfers[worker]
        done = self.now + pull + compute + push
        self.schedule(done, _ARRIVE, worker, self.lives[worker])

    def push(self, worker: int) -> None:
        """Finish a step at the server."""
        step = self.steps.pop(worker)
        update = self.compute.update(worker, step.params, step.batch, step.clock)
        self.run.push(worker, update, step.version)
        self.asking[worker] = self.now
        self.ask(worker)

    def drop(self, worker: int) -> None:
        """Let a worker go, whatever it was doing."""
        self.run.leave(worker, self.asking.pop(worker, None))
        self.lives[worker] += 1
        self.steps.pop(worker, None)
