"""An asynchronous run in virtual time: the real server, and workers that consist of durations only."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
import optax

from shardopt.core import (
    PyTree,
    calling,
    check_count,
    check_number,
    is_integer,
    is_number,
    type_error,
    value_error,
)
from shardopt.core._block_model import LossFn
from shardopt.mesh import make_mesh
from shardopt.parameter_server._run import AsyncResult, AsyncRun, BatchesOf, WorkerCompute
from shardopt.parameter_server._server import ServerSettings
from shardopt.parameter_server._updates import trained
from shardopt.parameter_server._worker import check_codec, key_data, no_compute, sgd_spec
from shardopt.parameter_server.rules import StalenessRule
from shardopt.reducers import Reducer

CALLER = "simulate"

Duration = float | Callable[[np.random.Generator], float]
"""Seconds, or a function that draws them."""


class SimulatedWorker(NamedTuple):
    """A worker of `simulate`.

    Attributes:
      step_seconds: the duration of a gradient: seconds, or a function `(numpy generator) ->
        seconds`, such as `lambda rng: rng.exponential(2.0)`.
      latency: seconds that a message takes in each direction, in addition to its size / bandwidth.
      bandwidth: bytes per second, in each direction.
      availability: the periods `(from, to)` of its work, in seconds. It joins at the start of
        each period. At the end of a period it dies, and its step in flight is lost.

    Example:
      >>> SimulatedWorker(step_seconds=0.5, availability=((0.0, 60.0), (90.0, float("inf")))).latency
      0.0
    """

    step_seconds: Duration = 1.0
    latency: float = 0.0
    bandwidth: float = math.inf
    availability: Sequence[tuple[float, float]] = ((0.0, math.inf),)

    def transfer_seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


@calling(CALLER)
def simulate(
    workers: int | Sequence[SimulatedWorker],
    *,
    max_staleness: int | None = 0,
    num_updates: int | None = None,
    until: float = math.inf,
    rule: StalenessRule | None = None,
    reducer: Reducer | None = None,
    nonfinite: str = "raise",
    message_bytes: float | None = None,
    server_seconds: float = 0.0,
    seed: int = 0,
    tx: optax.GradientTransformation | None = None,
    loss_fn: LossFn | None = None,
    params: PyTree = None,
    batches_of: BatchesOf | None = None,
    rng: jax.Array | None = None,
) -> AsyncResult:
    """Simulate an asynchronous run in virtual time, event by event, on the same server that real
    workers use.

    Args:
      workers: the workers, or a number of equal workers with steps of one second.
      max_staleness: as for `async_sgd`, in clocks; None for no bound.
      num_updates: stop when this many updates have been applied; with max_staleness=0 an update is
        a whole clock.
      until: stop at this virtual time, in seconds.
      rule: a staleness rule.
      reducer: as for `async_sgd`.
      nonfinite: as for `make_server`.
      message_bytes: the size of a pull and of a push. By default a pull has the size of the
        parameters, and a push the size of their encoding by the reducer; without parameters both
        are 0.
      server_seconds: the seconds that the server needs for a push.
      seed: the seed of the durations; each worker has its own generator.
      tx: the optimizer, for real updates.
      loss_fn: the loss, as for `async_sgd`.
      params: the parameters to start from.
      batches_of: `batches_of(worker)` returns its batches, as for `run` of `async_sgd`. A worker
        without batches leaves.
      rng: a random key for losses that take one.

    Returns:
      An `AsyncResult`, its times in virtual seconds.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, `num_updates` is None and `until` is infinite, or
        only some of `tx`, `loss_fn`, `params` and `batches_of` are given.
      NonFiniteUpdateError: as the server raises it.

    Example:
      >>> workers = [SimulatedWorker()] * 3 + [SimulatedWorker(step_seconds=4.0)]
      >>> waiting, free = (simulate(workers, max_staleness=s, until=400.0).metrics for s in (0, None))
      >>> waiting["pushes_per_second"], free["pushes_per_second"]
      (1.0, 3.25)

    Each step of a worker has four phases:

    1. It waits while the staleness bound holds it back.
    2. It pulls: latency + message_bytes / bandwidth.
    3. It computes: step_seconds.
    4. It pushes: latency + message_bytes / bandwidth again. The server takes pushes in the order of
       arrival, and needs server_seconds for each.

    If two events have the same time, the event that was scheduled first happens first.

    With `tx`, `loss_fn`, `params` and `batches_of` the run also computes the real gradients and
    updates, on one thread. Without them only time is simulated, and thousands of workers take
    seconds.

    **Equivalence**: the same arguments give the same log. A run on threads or a cluster whose
    events have the same order gives the same parameters, bit for bit.
    """
    workers = _check_workers(workers)
    _check_numbers(num_updates, until, message_bytes, server_seconds, seed)
    codec = check_codec(reducer)
    training_arguments = {"tx": tx, "loss_fn": loss_fn, "params": params, "batches_of": batches_of}
    missing = [name for name, value in training_arguments.items() if value is None]
    if missing and len(missing) < len(training_arguments):
        problem = (
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing for real"
            " mathematics."
        )
        raise value_error(problem, fix="pass tx, loss_fn, params and batches_of, or none of them.")
    settings = ServerSettings(max_staleness, rule, nonfinite, reducer)
    if tx is None or loss_fn is None or batches_of is None:
        make_server = settings.maker(None)
        header = {}
        compute = no_compute()
        sizes = (0, 0)
    else:
        mesh = make_mesh(data=1, devices=jax.local_devices()[:1])
        spec = sgd_spec(CALLER, tx, loss_fn, [mesh] * len(workers), settings)
        key = key_data(rng)
        make_server = spec.make_server
        header = spec.settings(key)
        compute = spec.make_compute(batches_of, key)
        spec.check_params(params)
        params = jax.device_put(params, compute.device)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        sizes = (size, size if codec is None else codec.nbytes(trained(params)))
    if message_bytes is not None:
        sizes = (message_bytes, message_bytes)
    transfers = [
        (worker.transfer_seconds(sizes[0]), worker.transfer_seconds(sizes[1])) for worker in workers
    ]
    loop = EventLoop(workers, transfers, compute, server_seconds, seed)
    loop.run = AsyncRun(make_server(donate=False), params, header, lambda: loop.now)
    return loop.run.finish(loop.run_until(num_updates, until))


def _check_workers(workers: int | Sequence[SimulatedWorker]) -> Sequence[SimulatedWorker]:
    """Return the sequence of workers, or a number of equal workers as a list.

    Refuse other arguments.
    """
    if is_integer(workers):
        check_count("workers", workers, minimum=1)
        return [SimulatedWorker()] * int(workers)
    if isinstance(workers, SimulatedWorker) or not isinstance(workers, Sequence):
        problem = (
            "workers must be an integer or a sequence of SimulatedWorker, got"
            f" {type(workers).__name__}."
        )
        raise type_error(problem)
    if not workers:
        raise ValueError(f"{CALLER}: workers must be at least 1, got none.")
    for number, worker in enumerate(workers):
        name = f"workers[{number}]"
        if not isinstance(worker, SimulatedWorker):
            raise TypeError(
                f"{CALLER}: {name} must be a SimulatedWorker, got {type(worker).__name__}."
            )
        if not callable(worker.step_seconds):
            check_number(f"{name}.step_seconds", worker.step_seconds)
        check_number(f"{name}.latency", worker.latency)
        if worker.bandwidth != math.inf:
            check_number(f"{name}.bandwidth", worker.bandwidth, positive=True)
        check_availability(name, worker.availability)
    return workers


def check_availability(name: str, availability: Sequence[tuple[float, float]]) -> None:
    """Refuse periods that are not pairs of numbers, or whose numbers do not increase from each to
    the next.
    """
    numbers = []
    if isinstance(availability, Sequence) and all(
        isinstance(p, Sequence) and len(p) == 2 for p in availability
    ):
        numbers = [number for period in availability for number in period]
    if not numbers or not all(map(is_number, numbers)):
        raise type_error(
            f"{name}.availability must be a sequence of periods (from, to), got {availability!r}."
        )
    if not numbers[0] >= 0 or not all(a < b for a, b in itertools.pairwise(numbers)):
        raise value_error(f"{name}.availability must rise from at least 0, got {availability!r}.")


def _check_numbers(
    num_updates: int | None,
    until: float,
    message_bytes: float | None,
    server_seconds: float,
    seed: int,
) -> None:
    if num_updates is not None:
        check_count("num_updates", num_updates, minimum=0)
    if until != math.inf:
        check_number("until", until)
    elif num_updates is None:
        fix = "pass num_updates, or until in seconds."
        raise value_error("nothing says when to stop.", fix=fix)
    if message_bytes is not None:
        check_number("message_bytes", message_bytes)
    check_number("server_seconds", server_seconds)
    check_count("seed", seed, minimum=0)


_JOIN, _ARRIVE, _PUSH, _DIE = range(4)


class Step(NamedTuple):
    """A step in flight: its version, its clock, its batch, and the parameters from which it
    started.
    """

    version: int
    clock: int
    params: PyTree
    batch: PyTree


@dataclass
class EventLoop:
    """A simulation: a queue of events in virtual time, and the `run` that they change, which must
    be set before use.
    """

    workers: Sequence[SimulatedWorker]
    transfers: Sequence[tuple[float, float]]
    compute: WorkerCompute
    server_seconds: float
    seed: int
    run: AsyncRun = field(init=False)

    def __post_init__(self):
        self.now = 0.0
        # One generator a worker: its draws do not depend on the order of events of others.
        self.generators = [
            np.random.default_rng([self.seed, worker]) for worker in range(len(self.workers))
        ]
        # counts deaths: messages of an earlier incarnation are lost
        self.incarnations = [0] * len(self.workers)
        self.steps: dict[int, Step] = {}
        # worker between steps -> time since which it asks, in the order of asking
        self.asked_at: dict[int, float] = {}
        self.server_free_at = 0.0
        self.num_scheduled = 0
        self.queue: list[tuple[float, int, int, int, int]] = []
        for worker, simulated_worker in enumerate(self.workers):
            for start, end in simulated_worker.availability:
                self.schedule(start, _JOIN, worker, 0)
                if end < math.inf:
                    self.schedule(end, _DIE, worker, 0)

    def schedule(self, time: float, kind: int, worker: int, incarnation: int) -> None:
        """Put an event into the queue.

        Events at the same time happen in the order of these calls.
        """
        # The running number breaks ties, so equal times have an order that does not depend on the
        # heap.
        heapq.heappush(self.queue, (time, self.num_scheduled, kind, worker, incarnation))
        self.num_scheduled += 1

    def run_until(self, num_updates: int | None, end: float) -> str:
        """Process events.

        Return "completed" after enough updates, "until" at the end time, "exhausted" without
        events.
        """
        while num_updates is None or self.run.state.version < num_updates:
            if not self.queue:
                return "exhausted"
            time, _, kind, worker, incarnation = heapq.heappop(self.queue)
            if time > end:
                return "until"
            self.now = time
            slowest = self.run.state.clock.slowest
            if kind == _JOIN:
                self.run.join(worker)
                self.compute.begin(worker, self.run.positions[worker])
                self.asked_at[worker] = self.now
                self.ask(worker)
            elif kind == _DIE:
                if worker in self.run.state.clock.steps:
                    self.remove_worker(worker)
            elif incarnation == self.incarnations[worker] and kind == _ARRIVE:
                # A server with one desk: a push begins when it arrives, or when the one before it
                # is done.
                self.server_free_at = max(time, self.server_free_at) + self.server_seconds
                self.schedule(self.server_free_at, _PUSH, worker, incarnation)
            elif incarnation == self.incarnations[worker]:
                self.push(worker)
            # Only a rise of the slowest clock lets others start. Those may leave, and let it rise
            # once more.
            while self.run.state.clock.slowest > slowest:
                slowest = self.run.state.clock.slowest
                for waiting in list(self.asked_at):
                    self.ask(waiting)
        return "completed"

    def ask(self, worker: int) -> None:
        """Start a worker's next step if it may."""
        if not self.run.may_pull(worker):
            return
        batch = self.compute.next_batch(worker)
        if batch is None:
            self.remove_worker(worker)
            return
        event = self.run.pull(worker, self.asked_at.pop(worker))
        self.steps[worker] = Step(event.version, event.clock, self.run.state.params, batch)
        duration = self.workers[worker].step_seconds
        step_seconds = duration(self.generators[worker]) if callable(duration) else duration
        pull_seconds, push_seconds = self.transfers[worker]
        arrival = self.now + pull_seconds + step_seconds + push_seconds
        self.schedule(arrival, _ARRIVE, worker, self.incarnations[worker])

    def push(self, worker: int) -> None:
        """Finish a step at the server."""
        step = self.steps.pop(worker)
        # Computed when it arrives, from the parameters of its pull: the order of events alone
        # decides the numbers, not the real time of the computation.
        update = self.compute.update(worker, step.params, step.batch, step.clock)
        self.run.push(worker, update, step.version)
        self.asked_at[worker] = self.now
        self.ask(worker)

    def remove_worker(self, worker: int) -> None:
        """Remove a worker, and its step in flight if it has one."""
        self.run.leave(worker, self.asked_at.pop(worker, None))
        self.incarnations[worker] += 1
        self.steps.pop(worker, None)
