"""The two kinds of processes of a run on Ray: the server, and a worker, each with a JAX runtime of its own."""

import contextlib
import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.coordinator import Coordinator, Milestone, Task
from shardopt.parameter_server.run import AsyncResult, Run, Snapshot, restore_run, snapshot
from shardopt.parameter_server.threads import settings_values, use_settings
from shardopt.parameter_server.worker import Compute, run_worker


class Failed(NamedTuple):
    """What a process says instead of a result: the error, and its traceback as text."""

    error: BaseException
    trace: str


class ServerLost(NamedTuple):
    """What a worker says when the server is gone: the newest version that it knew of."""

    version: int


class ServerProcess:
    """A `Coordinator` in a process of its own; parameters go to workers through the object store."""

    def __init__(self, settings: dict[str, Any], spec: bytes):
        from ray import cloudpickle

        begin_process(settings, devices=1, platform="cpu")
        what = cloudpickle.loads(spec)
        began = time.perf_counter()
        run = Run(what["make_server"](True), what["params"], what["header"], lambda: time.perf_counter() - began)
        if what["snapshot"] is not None:
            restore_run(what["who"], run, Snapshot(*what["snapshot"]))
        policy = what["policy"]
        self.coordinator = Coordinator(run, what["num_updates"], what["availability"], policy.wanted, policy.keep)
        self.shared: tuple[int, Any] = (-1, None)
        self.sharing = threading.Lock()

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self.coordinator.enter(worker, incarnation)

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """See `Coordinator.pull`; the parameters are a reference into the object store, one a version."""
        task = self.coordinator.pull(worker, incarnation, ready)
        return None if task is None else task._replace(params=self._share(task))

    def push(self, worker: int, incarnation: int, update: Any, version: int) -> tuple[bool, int] | Failed:
        """See `Coordinator.push`; says the version as well."""
        try:
            goes_on = self.coordinator.push(worker, incarnation, update, version)
            return goes_on, self.coordinator.run.state.version
        except Exception as error:
            return Failed(error, traceback.format_exc())

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call another method of the coordinator."""
        return getattr(self.coordinator, name)(*arguments, **options)

    def milestone(self, timeout: float) -> Milestone | None:
        """See `Coordinator.milestone`; as numpy arrays."""
        found = self.coordinator.milestone(timeout)
        return found if found is None else jax.device_get(found)

    def clock_of(self, worker: int) -> int | None:
        """Return the steps that a worker has finished, None if it is not there."""
        return self.coordinator.run.state.clock.steps.get(worker)

    def log(self) -> Any:
        """Return the log so far."""
        with self.coordinator.changed:
            return self.coordinator.run.log

    def finish(self, metrics: dict[str, Any], keep: bool) -> tuple[Any, Any]:
        """Return the result, and a snapshot if it is to be kept, as numpy arrays."""
        result = self.coordinator.run.finish(self.coordinator.why(), **metrics)
        kept = jax.device_get(tuple(snapshot(self.coordinator.run))) if keep else None
        return result._replace(params=jax.device_get(result.params)), kept

    def _share(self, task: Task) -> Any:
        import ray

        with self.sharing:
            if self.shared[0] != task.version:
                self.shared = (task.version, ray.put(jax.device_get(task.params)))
            return [self.shared[1]]  # in a list, or Ray would send the parameters themselves


class WorkerProcess:
    """A worker; its programs stay compiled when the server comes back."""

    def __init__(self, settings: dict[str, Any], devices: int):
        begin_process(settings, devices=devices)
        self.compute: Compute | None = None

    def pid(self) -> int:
        """Return the process's number."""
        return os.getpid()

    def work(self, server: Any, worker: int, incarnation: int, spec: bytes) -> ServerLost | Failed | None:
        """Live through a run; say what ended it, None for its end."""
        from ray import cloudpickle

        coordinator = RemoteCoordinator(server)
        try:
            compute = self.compute
            if compute is None:
                make, batches_of, key = cloudpickle.loads(spec)
                compute = self.compute = make(batches_of, key, worker)
            run_worker(coordinator, compute, worker, incarnation)
        except _Gone:
            return ServerLost(coordinator.version)
        except _AtServer as error:
            return error.failed
        except Exception as error:
            return Failed(error, traceback.format_exc())
        return None


class RemoteCoordinator:
    """The coordinator as a worker in another process sees it."""

    def __init__(self, server: Any):
        self.server, self.version = server, 0

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._get(self.server.enter.remote(worker, incarnation))

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """See `Coordinator.pull`."""
        task = self._get(self.server.pull.remote(worker, incarnation, ready))
        if task is None:
            return None
        self.version = max(self.version, task.version)
        return task._replace(params=self._get(task.params[0]))

    def push(self, worker: int, incarnation: int, update: Any, version: int) -> bool:
        """See `Coordinator.push`; one message, which arrives whole or not at all."""
        arrays = jax.device_get(update._replace(rows=None))._replace(rows=update.rows)
        found = self._get(self.server.push.remote(worker, incarnation, arrays, version))
        if isinstance(found, Failed):
            raise _AtServer(found)
        self.version = max(self.version, found[1])
        return found[0]

    def _get(self, reference: Any) -> Any:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError

        try:
            return ray.get(reference)
        except (RayActorError, ObjectLostError) as error:
            raise _Gone from error


class _Gone(Exception):  # noqa: N818
    pass


class _AtServer(Exception):  # noqa: N818
    def __init__(self, failed: Failed):
        super().__init__()
        self.failed = failed


def begin_process(settings: dict[str, Any], *, devices: int, platform: str | None = None) -> None:
    """Set up jax in a fresh process as it is set up in the caller's, with so many devices if they are CPUs."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    use_settings(settings)


# A run on Ray: the caller starts server and workers, and stands by: who dies, who comes back, what is saved.


# Processes that were killed, and nobody to go on.


class ServerLostError(RuntimeError):
    """The process of the server was killed, and there is nothing to go on from."""


class WorkersLostError(RuntimeError):
    """Every worker was killed."""


# A Ray to run on: one that is there, one at an address, or a local one that starts and ends with the run.


_SECONDS = 5.0
"""How long an address may take to answer; Ray itself would try for minutes."""


@contextmanager
def cluster(who: str, address: str | None, num_workers: int) -> Iterator[Any]:
    """Return the module `ray`, connected.

    Raises:
      ImportError: if Ray is not installed.
      ConnectionError: if nothing answers at the address.
      ValueError: if this process is connected to another Ray than the address says.
    """
    try:
        import ray
    except ImportError as error:
        fix = "pip install 'shardopt[ray]', or use backend=\"threads\"."
        raise ImportError(format_error(who, "backend 'ray' needs Ray, which is not installed.", fix=fix)) from error
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            what = f"this process is connected to the Ray at {here} already, not to {address}."
            raise ValueError(format_error(who, what, fix="call ray.shutdown() first, or leave address out."))
        yield ray
        return
    if address is None:
        with warnings.catch_warnings():
            # jax warns of forks; what Ray forks becomes another program at once.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            ray.init(
                num_cpus=num_workers + 1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1"
            )
    else:
        _join(who, ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def check_capacity(who: str, ray: Any, num_workers: int) -> None:
    """Refuse a cluster on which the processes would wait for ever to be started.

    Raises:
      ValueError: if it has fewer CPUs than server and workers ask for, one each.
    """
    there = ray.cluster_resources().get("CPU", 0)
    if there < num_workers + 1:
        what = f"{num_workers} workers and a server need {num_workers + 1} CPUs, and the Ray cluster has {there:g}."
        raise ValueError(
            format_error(who, what, fix="start it with more (ray.init(num_cpus=...)), or use fewer workers.")
        )


def _join(who: str, ray: Any, address: str) -> None:
    fix = "start Ray there (ray start --head), correct the address, or leave it out for a local Ray."
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():
            with contextlib.closing(socket.create_connection((host, int(port)), timeout=_SECONDS)):
                pass
        ray.init(address=address, log_to_driver=False)
    except (OSError, ConnectionError, ValueError, RuntimeError) as error:
        what = f"no Ray answers at {address!r} ({type(error).__name__}: {str(error).splitlines()[0]})."
        raise ConnectionError(format_error(who, what, fix=fix)) from error


_POLL = 0.5
"""Seconds that the caller waits for a milestone before it looks after the workers again."""


class Spec(NamedTuple):
    """What a run on Ray is made of; all of it crosses to other processes.

    Attributes:
      who: the function that the user called, for messages.
      devices: how many each worker's process has.
      make_server: `make_server(donate) -> Server`.
      make_compute: `make_compute(batches_of, key, worker) -> Compute`.
      header: of the log.
      availability: worker -> periods in versions.
      max_restarts: how often each worker that was killed is started again.
    """

    who: str
    devices: Sequence[int]
    make_server: Callable[[bool], Any]
    make_compute: Callable[..., Any]
    header: Mapping[str, Any]
    availability: Mapping[int, Any]
    max_restarts: int


class RayDriver:
    """The processes of a run, as the caller sees them."""

    def __init__(
        self, ray: Any, spec: Spec, params: PyTree, batches_of: Any, key: Any, num_updates: int, callbacks: Any
    ):
        check_capacity(spec.who, ray, len(spec.devices))
        self.ray, self.spec, self.params, self.num_updates, self.callbacks = ray, spec, params, num_updates, callbacks
        self.settings = settings_values()
        self.job = ray.cloudpickle.dumps((spec.make_compute, batches_of, key))
        self.gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.alive: dict[int, Any] = {}
        self.restarts = dict.fromkeys(spec.availability, spec.max_restarts)
        self.killed: list[int] = []
        self.seen, self.lost_updates = 0, 0
        self.server: Any = None
        self.works: dict[Any, int] = {}

    def run(self, found: Snapshot | None) -> AsyncResult:
        """Train; whatever happens, `close` must be called."""
        self.start_server(found)
        for worker in self.spec.availability:
            self.start_worker(worker)
        self.send_to_work()
        while not self.stand_by():
            self.restart_server()
        why, keep = self.call("why"), self.callbacks.checkpoints is not None
        lost = why == "exhausted" and not self.alive
        more = {"killed": self.killed, "lost_updates": self.lost_updates, **self.callbacks.metrics()}
        result, kept = self.ray.get(self.server.finish.remote(more, keep))
        self.callbacks.finish(None if kept is None else Snapshot(*kept))
        if lost:
            what = f"all {len(self.spec.availability)} workers were killed, the last one at version"
            what += f" {result.metrics['updates']} of {self.num_updates}."
            fix = "pass max_restarts so that they are started again, or checkpoints to go on from here."
            error = WorkersLostError(format_error(self.spec.who, what, fix=fix))
            error.add_note(f"Killed, in this order: {self.killed}.")
            raise error
        return result._replace(params=jax.device_put(result.params))

    def close(self) -> None:
        """Leave nothing running."""
        for actor in [*self.alive.values(), *([] if self.server is None else [self.server])]:
            self.ray.kill(actor)

    def log(self) -> Any:
        """Return the log so far, None if the server is gone."""
        try:
            return None if self.server is None else self.ray.get(self.server.log.remote(), timeout=10)
        except self.ray.exceptions.RayError:
            return None

    def start_server(self, found: Snapshot | None) -> None:
        """Start the server, from a checkpoint or from the beginning."""
        availability = self.spec.availability
        if self.server is not None:  # whoever is dead for good is not waited for
            availability = {worker: availability[worker] for worker in self.alive}
        what = {
            "who": self.spec.who,
            "make_server": self.spec.make_server,
            "params": jax.device_get(self.params),
            "header": self.spec.header,
            "snapshot": None if found is None else jax.device_get(tuple(found)),
            "num_updates": self.num_updates,
            "availability": availability,
            "policy": self.callbacks.policy,
        }
        # Every worker may wait in a call of its own, and calls of killed ones end only when they are noticed.
        process = self.ray.remote(ServerProcess).options(num_cpus=1, max_concurrency=4 * len(self.spec.devices) + 8)
        self.server = process.remote(self.settings, self.ray.cloudpickle.dumps(what))
        self.incarnations = dict.fromkeys(self.spec.availability, 0)

    def start_worker(self, worker: int) -> None:
        """Start a worker's process."""
        devices = self.spec.devices[worker]
        process = self.ray.remote(WorkerProcess).options(num_cpus=1, num_gpus=devices if self.gpus else 0)
        self.alive[worker] = process.remote(self.settings, devices)

    def send_to_work(self) -> None:
        """Let every worker that is idle and alive work."""
        for worker, actor in self.alive.items():
            if worker not in self.works.values():
                self.works[actor.work.remote(self.server, worker, self.incarnations[worker], self.job)] = worker

    def stand_by(self) -> bool:
        """Look after the run until nobody works any more; say False if that is because the server is gone."""
        milestone, server_lost = self.server.milestone.remote(_POLL), False
        while self.works:
            waiting = [*self.works] if server_lost else [*self.works, milestone]
            ready, _ = self.ray.wait(waiting, num_returns=1)
            if ready[0] in self.works:
                server_lost |= self.ended(ready[0], self.works.pop(ready[0]))
            else:
                try:
                    self.reached(self.ray.get(milestone))
                    self.callbacks.show(self.status)
                    milestone = self.server.milestone.remote(_POLL)
                except self.ray.exceptions.RayActorError:
                    server_lost = True
        if server_lost or not self.server_lives():
            return False
        self.reached(self.ray.get(milestone))  # what was under way when the last worker ended
        while not self.callbacks.idle and (found := self.ray.get(self.server.milestone.remote(_POLL))) is not None:
            self.reached(found)
        self.callbacks.show(self.status, last=True)
        return True

    def reached(self, milestone: Any) -> None:
        """Evaluate, save, stop early."""
        if milestone is not None:
            self.seen = max(self.seen, milestone.version)
            if self.callbacks.handle(milestone):
                self.call("finish_early")

    def ended(self, reference: Any, worker: int) -> bool:
        """Take note of how a worker's work ended; say whether the server is gone."""
        try:
            outcome = self.ray.get(reference)
        except self.ray.exceptions.RayActorError:
            self.died(worker)
            return False
        if isinstance(outcome, ServerLost):
            self.seen = max(self.seen, outcome.version)
            return True
        if isinstance(outcome, Failed):
            at = self.ray.get(self.server.clock_of.remote(worker)) if self.server_lives() else None
            step = "" if at is None else f" at its step {at}"
            outcome.error.add_note(f"This happened in worker {worker} of {self.spec.who}{step}, a process of its own:")
            outcome.error.add_note(outcome.trace)
            raise outcome.error
        self.tell("done", worker)
        return False

    def died(self, worker: int) -> None:
        """A worker was killed: the clock forgets it, and it is started again if it may."""
        self.killed.append(worker)
        del self.alive[worker]
        again = self.restarts[worker] > 0
        self.tell("lost", worker, expected=again)
        self.incarnations[worker] += 1
        if again:
            self.restarts[worker] -= 1
            self.start_worker(worker)
            self.send_to_work()

    def restart_server(self) -> None:
        """Start the server again from its last checkpoint, and send the workers there."""
        checkpoints, who = self.callbacks.checkpoints, self.spec.who
        if checkpoints is None:
            what = (
                f"the process of the server was killed, at version {self.seen} or later, and no checkpoints were kept."
            )
            raise ServerLostError(
                format_error(who, what, fix="pass checkpoints=so.Checkpoints(folder, every=..., keep=...).")
            )
        checkpoints.wait()
        if checkpoints.latest() is None:
            what = (
                f"the process of the server was killed, at version {self.seen} or later, before its first checkpoint."
            )
            raise ServerLostError(format_error(who, what, fix="save more often, or run again."))
        found = self.callbacks.latest(self.spec.make_server(False), jax.device_put(self.params))
        self.lost_updates += max(0, self.seen - int(found.state.step))
        self.start_server(found)
        self.send_to_work()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the coordinator."""
        return self.ray.get(self.server.call.remote(name, *arguments))

    def status(self) -> Any:
        """Return who is doing what."""
        return self.call("status")

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the coordinator, which may be gone."""
        with contextlib.suppress(self.ray.exceptions.RayActorError):  # the workers notice, and `stand_by` says so
            self.ray.get(self.server.call.remote(name, *arguments, **options))

    def server_lives(self) -> bool:
        """Say whether the server answers."""
        try:
            self.call("why")
            return True
        except self.ray.exceptions.RayActorError:
            return False
