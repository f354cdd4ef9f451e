"""A run on Ray: the caller starts server and workers, and stands by: who dies, who comes back, what is saved."""

import contextlib
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.ray_processes import Failed, ServerLost, ServerProcess, WorkerProcess
from shardopt.parameter_server.run import AsyncResult
from shardopt.parameter_server.saving import Snapshot
from shardopt.parameter_server.threads import settings_values

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
      presence: worker -> periods in versions.
      max_restarts: how often each worker that was killed is started anew.
    """

    who: str
    devices: Sequence[int]
    make_server: Callable[[bool], Any]
    make_compute: Callable[..., Any]
    header: Mapping[str, Any]
    presence: Mapping[int, Any]
    max_restarts: int


class RayDriver:
    """The processes of a run, as the caller sees them."""

    def __init__(self, ray: Any, spec: Spec, params: PyTree, batches_of: Any, key: Any, num_updates: int, watch: Any):
        check_capacity(spec.who, ray, len(spec.devices))
        self.ray, self.spec, self.params, self.num_updates, self.watch = ray, spec, params, num_updates, watch
        self.settings = settings_values()
        self.job = ray.cloudpickle.dumps((spec.make_compute, batches_of, key))
        self.gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.alive: dict[int, Any] = {}
        self.restarts = dict.fromkeys(spec.presence, spec.max_restarts)
        self.killed: list[int] = []
        self.seen, self.lost_updates = 0, 0
        self.server: Any = None
        self.works: dict[Any, int] = {}

    def run(self, found: Snapshot | None) -> AsyncResult:
        """Train; whatever happens, `close` must be called."""
        self.start_server(found)
        for worker in self.spec.presence:
            self.start_worker(worker)
        self.send_to_work()
        while not self.stand_by():
            self.restart_server()
        why, keep = self.call("why"), self.watch.checkpoints is not None
        lost = why == "exhausted" and not self.alive
        more = {"killed": self.killed, "lost_updates": self.lost_updates, **self.watch.metrics()}
        result, kept = self.ray.get(self.server.finish.remote(more, keep))
        self.watch.finish(None if kept is None else Snapshot(*kept))
        if lost:
            what = f"all {len(self.spec.presence)} workers were killed, the last one at version"
            what += f" {result.metrics['updates']} of {self.num_updates}."
            fix = "pass max_restarts so that they are started anew, or checkpoints to go on from here."
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
        presence = self.spec.presence
        if self.server is not None:  # whoever is dead for good is not waited for
            presence = {worker: presence[worker] for worker in self.alive}
        what = {
            "who": self.spec.who,
            "make_server": self.spec.make_server,
            "params": jax.device_get(self.params),
            "header": self.spec.header,
            "snapshot": None if found is None else jax.device_get(tuple(found)),
            "num_updates": self.num_updates,
            "presence": presence,
            "wishes": self.watch.wishes,
        }
        # Every worker may wait in a call of its own, and calls of killed ones end only when they are noticed.
        process = self.ray.remote(ServerProcess).options(num_cpus=1, max_concurrency=4 * len(self.spec.devices) + 8)
        self.server = process.remote(self.settings, self.ray.cloudpickle.dumps(what))
        self.lives = dict.fromkeys(self.spec.presence, 0)

    def start_worker(self, worker: int) -> None:
        """Start a worker's process."""
        devices = self.spec.devices[worker]
        process = self.ray.remote(WorkerProcess).options(num_cpus=1, num_gpus=devices if self.gpus else 0)
        self.alive[worker] = process.remote(self.settings, devices)

    def send_to_work(self) -> None:
        """Let every worker that is idle and alive work."""
        for worker, actor in self.alive.items():
            if worker not in self.works.values():
                self.works[actor.work.remote(self.server, worker, self.lives[worker], self.job)] = worker

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
                    self.watch.show(self.status)
                    milestone = self.server.milestone.remote(_POLL)
                except self.ray.exceptions.RayActorError:
                    server_lost = True
        if server_lost or not self.server_lives():
            return False
        self.reached(self.ray.get(milestone))  # what was under way when the last worker ended
        while not self.watch.idle and (found := self.ray.get(self.server.milestone.remote(_POLL))) is not None:
            self.reached(found)
        self.watch.show(self.status, last=True)
        return True

    def reached(self, milestone: Any) -> None:
        """Evaluate, save, stop early."""
        if milestone is not None:
            self.seen = max(self.seen, milestone.version)
            if self.watch.handle(milestone):
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
        """A worker was killed: the clock forgets it, and it is started anew if it may."""
        self.killed.append(worker)
        del self.alive[worker]
        again = self.restarts[worker] > 0
        self.tell("lost", worker, expected=again)
        self.lives[worker] += 1
        if again:
            self.restarts[worker] -= 1
            self.start_worker(worker)
            self.send_to_work()

    def restart_server(self) -> None:
        """Start the server anew from its last checkpoint, and send the workers there."""
        checkpoints, who = self.watch.checkpoints, self.spec.who
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
        found = self.watch.latest(self.spec.make_server(False), jax.device_put(self.params))
        self.lost_updates += max(0, self.seen - int(found.state.step))
        self.start_server(found)
        self.send_to_work()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the hall."""
        return self.ray.get(self.server.call.remote(name, *arguments))

    def status(self) -> Any:
        """Return who is doing what."""
        return self.call("status")

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the hall, which may be gone."""
        with contextlib.suppress(self.ray.exceptions.RayActorError):  # the workers notice, and `stand_by` says so
            self.ray.get(self.server.call.remote(name, *arguments, **options))

    def server_lives(self) -> bool:
        """Say whether the server answers."""
        try:
            self.call("why")
            return True
        except self.ray.exceptions.RayActorError:
            return False
