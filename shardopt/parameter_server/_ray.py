"""A run on Ray: the server and the workers are processes, which the caller starts and watches.

`RayDriver` is the caller's side: it notices dead processes, restarts them, and saves checkpoints.
`ServerProcess` and `WorkerProcess` are the two kinds of processes, each with its own JAX runtime.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.cloudpickle import cloudpickle
from ray.exceptions import ObjectLostError, RayActorError, RayError

from shardopt.core import format_error
from shardopt.parameter_server._callbacks import Callbacks
from shardopt.parameter_server._coordinator import Coordinator, Milestone, WorkerTask
from shardopt.parameter_server._log import Log
from shardopt.parameter_server._run import (
    AsyncJob,
    AsyncResult,
    AsyncRun,
    RunSnapshot,
    RunSpec,
    ServerLostError,
    WorkerCompute,
    WorkersLostError,
    restore_run,
    take_snapshot,
)
from shardopt.parameter_server._settings import begin_process, settings_values
from shardopt.parameter_server._updates import Update
from shardopt.parameter_server._views import Status
from shardopt.parameter_server._worker import Streams, no_compute, run_worker

_LOG = logging.getLogger(__name__)


def run_on_ray(spec: RunSpec, job: AsyncJob, callbacks: Callbacks) -> AsyncResult:
    """Train on Ray; when this returns, all processes of the run have ended."""
    Streams(spec.caller, job.batches_of)  # checks `batches_of`
    with cluster(spec.caller, spec.address, spec.num_processes):
        job = job._replace(params=jax.device_put(job.params))
        snapshot = callbacks.load_latest(spec.make_server(donate=False), job.params)
        callbacks.resumed_from = callbacks.saved_version = (
            None if snapshot is None else int(snapshot.state.step)
        )
        driver = RayDriver(spec, job, callbacks)
        log = None
        try:
            result = driver.run(snapshot)
            log = result.log
            return result
        finally:
            log = driver.log() if log is None else log
            driver.close()
            if job.log_path is not None and log is not None:
                log.save(job.log_path)


_CONNECT_SECONDS = 5.0
"""Seconds that an address may take to answer; Ray itself would try for minutes."""


@contextlib.contextmanager
def cluster(caller: str, address: str | None, num_processes: int) -> Iterator[None]:
    """Connect Ray: to the current cluster, to an address, or to a local Ray that ends with the run."""
    if ray.is_initialized():
        connected_address = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected_address):
            problem = (
                f"this process is connected to the Ray at {connected_address} already, not to"
                f" {address}."
            )
            raise ValueError(
                format_error(
                    caller, problem, fix="call ray.shutdown() first, or leave address out."
                )
            )
        yield
        return
    if address is None:
        options = {
            "num_cpus": num_processes,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
        with warnings.catch_warnings():
            # JAX warns of forks, but the processes that Ray forks load another program at once.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            ray.init(log_to_driver=False, **options)
    else:
        _connect(caller, address)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(caller: str, address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():
            with contextlib.closing(
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
            ):
                pass
        ray.init(address=address, log_to_driver=False)
    except (OSError, ConnectionError, ValueError, RuntimeError) as error:
        problem = (
            f"no Ray answers at {address!r} ({type(error).__name__}: {str(error).splitlines()[0]})."
        )
        fix = (
            "start Ray there (ray start --head), correct the address, or leave it out for a local"
            " Ray."
        )
        raise ConnectionError(format_error(caller, problem, fix=fix)) from error


def check_capacity(spec: RunSpec) -> None:
    """Refuse a cluster with too few CPUs, on which some processes would never start."""
    available_cpus = ray.cluster_resources().get("CPU", 0)
    if available_cpus < spec.num_processes:
        needs = f"{spec.num_workers} workers and a server need {spec.num_processes} CPUs"
        problem = f"{needs}, and the Ray cluster has {available_cpus:g}."
        fix = "start it with more (ray.init(num_cpus=...)), or use fewer workers."
        raise ValueError(format_error(spec.caller, problem, fix=fix))


_POLL_SECONDS = 0.5
"""Seconds that the caller waits for a milestone before it looks at the workers again."""
_COMPILE_FACTOR = 10
"""The factor on `hang_timeout` for a worker that has pushed nothing since it joined, and may be
compiling.
"""


class RayDriver:
    """The caller's handle of the processes of a run."""

    def __init__(self, spec: RunSpec, job: AsyncJob, callbacks: Callbacks):
        check_capacity(spec)
        self.token = secrets.token_hex()
        self.spec = spec
        self.job = job
        self.callbacks = callbacks
        self.settings = settings_values()
        self.pickled_compute = cloudpickle.dumps((spec.make_compute, job.batches_of, job.key))
        self.has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        # the process of each worker
        self.alive: dict[int, Any] = {}
        self.restarts_left = dict.fromkeys(job.workers, spec.max_restarts)
        self.killed: list[int] = []
        self.hung: list[int] = []
        # For each worker its activity when the driver last looked, and the time since which it has
        # not changed.
        self.last_progress: dict[int, tuple[object, float]] = {}
        # the time of evaluations and checkpoints, for which workers may have waited
        self.callback_seconds = 0.0
        self.last_version = 0
        self.lost_updates = 0
        self.server: Any = None
        # the calls of `WorkerProcess.work` that have not ended -> worker
        self.running: dict[ObjectRef, int] = {}

    def run(self, snapshot: RunSnapshot | None) -> AsyncResult:
        """Train; the caller must call `close` afterwards, even after an error."""
        self.start_server(snapshot)
        for worker in self.job.workers:
            self.start_worker(worker)
        self.start_work()
        while not self.watch():
            self.restart_server()
        end_reason = self.call("end_reason")
        with_snapshot = self.callbacks.checkpoints is not None
        all_died = end_reason == "exhausted" and not self.alive
        metrics = {"killed": self.killed, "hung": self.hung, "lost_updates": self.lost_updates}
        metrics |= self.callbacks.metrics()
        result, last_snapshot = ray.get(self.server.finish.remote(metrics, with_snapshot))
        self.callbacks.finish(last_snapshot)
        if all_died:
            problem = f"all {len(self.job.workers)} workers were killed, the last one at version"
            problem += f" {result.metrics['updates']} of {self.job.num_updates}."
            fix = (
                "pass max_restarts so that they are started again, or checkpoints to go on from"
                " here."
            )
            error = WorkersLostError(format_error(self.spec.caller, problem, fix=fix))
            error.add_note(f"Killed, in this order: {self.killed}.")
            raise error
        return result._replace(params=jax.device_put(result.params))

    def close(self) -> None:
        """End all processes of the run."""
        for actor in self.alive.values():
            ray.kill(actor)
        if self.server is not None:
            ray.kill(self.server)

    def log(self) -> Log | None:
        """Return the log so far; None if the server has died."""
        try:
            return None if self.server is None else ray.get(self.server.log.remote(), timeout=10)
        except RayError:
            return None

    def start_server(self, snapshot: RunSnapshot | None) -> None:
        """Start the server, from a checkpoint or from the beginning."""
        params, snapshot = jax.device_get((self.job.params, snapshot))
        # The server reads no data, and a function with a data set in it may be large to pickle.
        job = self.job._replace(params=params, batches_of=lambda _: (), log_path=None)
        # the new server must not wait for workers that are not restarted
        if self.server is not None:
            job = job._replace(workers=tuple(self.alive))
        # The loss and the data are not sent to the server.
        spec = self.spec._replace(make_compute=no_compute)
        start = cloudpickle.dumps((spec, job, self.callbacks.policy, snapshot))
        # Every worker may block in its own call, and the call of a killed worker ends only when its
        # death is noticed.
        process = ray.remote(ServerProcess).options(
            num_cpus=1, max_concurrency=4 * self.spec.num_workers + 8
        )
        self.server = process.remote(self.settings, self.token, start)
        self.incarnations = dict.fromkeys(self.job.workers, 0)

    def start_worker(self, worker: int) -> None:
        """Start a worker's process."""
        devices = self.spec.devices[worker]
        num_gpus = devices if self.has_gpus else 0
        process = ray.remote(WorkerProcess).options(num_cpus=1, num_gpus=num_gpus)
        self.alive[worker] = process.remote(self.settings, self.token, devices)

    def start_work(self) -> None:
        """Call `WorkerProcess.work` on the process of every worker that is alive and idle."""
        busy = set(self.running.values())
        for worker, actor in self.alive.items():
            if worker not in busy:
                incarnation = self.incarnations[worker]
                work = actor.work.remote(self.server, self.pickled_compute, worker, incarnation)
                self.running[work] = worker

    def watch(self) -> bool:
        """Handle milestones and dead workers until no worker runs.

        Return False if the server has died.
        """
        milestone = self.server.next_milestone.remote(_POLL_SECONDS)
        server_lost = False
        while self.running:
            waiting = [*self.running] if server_lost else [*self.running, milestone]
            ready, _ = ray.wait(waiting, num_returns=1)
            if ready[0] in self.running:
                server_lost |= self.handle_ended_process(ready[0], self.running.pop(ready[0]))
            else:
                try:
                    self.handle_milestone(ray.get(milestone))
                    self.callbacks.show(self.status)
                    self.kill_hung_workers()
                    milestone = self.server.next_milestone.remote(_POLL_SECONDS)
                except RayActorError:
                    server_lost = True
        if server_lost or not self.is_server_alive():
            return False
        # this call was in flight when the last worker ended
        self.handle_milestone(ray.get(milestone))
        has_more = not self.callbacks.has_no_milestones
        while has_more:
            next_milestone: Any = ray.get(self.server.next_milestone.remote(_POLL_SECONDS))
            self.handle_milestone(next_milestone)
            has_more = next_milestone is not None
        self.callbacks.show(self.status, last=True)
        return True

    def handle_milestone(self, milestone: Milestone | None) -> None:
        """Evaluate and save a milestone, and end the run if early stopping says so."""
        if milestone is not None:
            began = time.monotonic()
            self.last_version = max(self.last_version, milestone.version)
            if self.callbacks.handle(milestone):
                self.call("finish_early")
            self.callback_seconds += time.monotonic() - began

    def kill_hung_workers(self) -> None:
        """Kill the workers that made no progress for `hang_timeout` seconds although nothing held
        them back.
        """
        timeout = self.spec.hang_timeout
        if timeout is None:
            return
        # The clock stands still during evaluations and saves, when workers may wait for this
        # process.
        now = time.monotonic() - self.callback_seconds
        # At the end of a run, a process that has ended already may wait long for the others.
        running_workers = set(self.running.values())
        for status in self.status().workers:
            progress = status.doing, status.clock, status.pushes, self.incarnations[status.worker]
            last_progress, since = self.last_progress.get(status.worker, (None, now))
            if progress != last_progress or status.doing in ("waits", "gone"):
                self.last_progress[status.worker] = progress, now
            elif (
                now - since > timeout * (_COMPILE_FACTOR if status.is_new else 1)
                and status.worker in running_workers
            ):
                _LOG.warning(
                    "%s: worker %d hangs: it %s without progress for %.0f s, at its step %d; its"
                    " process is killed.",
                    *(self.spec.caller, status.worker, status.doing, now - since, status.clock),
                )
                self.hung.append(status.worker)
                self.handle_dead_worker(status.worker)

    def handle_ended_process(self, reference: ObjectRef, worker: int) -> bool:
        """Handle the result of a worker's process that has ended.

        Return whether the server has died.
        """
        try:
            outcome = ray.get(reference)
        except RayActorError:
            self.handle_dead_worker(worker)
            return False
        if isinstance(outcome, ServerLostReport):
            self.last_version = max(self.last_version, outcome.version)
            return True
        if isinstance(outcome, ProcessFailure):
            step = ray.get(self.server.clock_of.remote(worker)) if self.is_server_alive() else None
            at_step = "" if step is None else f" at its step {step}"
            outcome.error.add_note(
                f"This happened in worker {worker} of {self.spec.caller}{at_step}, a process of its"
                " own:"
            )
            outcome.error.add_note(outcome.trace)
            raise outcome.error
        self.notify("worker_ended", worker)
        return False

    def handle_dead_worker(self, worker: int) -> None:
        """Remove a worker whose process died or hangs, and restart it if it has restarts left."""
        self.killed.append(worker)
        ray.kill(self.alive.pop(worker))
        self.running = {work: other for work, other in self.running.items() if other != worker}
        will_restart = self.restarts_left[worker] > 0
        self.notify("worker_died", worker, restarting=will_restart)
        # The driver counts too: the coordinator has done the same in `worker_died`.
        self.incarnations[worker] += 1
        if will_restart:
            self.restarts_left[worker] -= 1
            self.start_worker(worker)
            self.start_work()

    def restart_server(self) -> None:
        """Restart the server from its last checkpoint, and let the workers continue with it."""
        checkpoints = self.callbacks.checkpoints
        caller = self.spec.caller
        problem = f"the process of the server was killed, at version {self.last_version} or later,"
        if checkpoints is None:
            fix = "pass checkpoints=so.Checkpoints(folder, every=..., keep=...)."
            raise ServerLostError(
                format_error(caller, f"{problem} and no checkpoints were kept.", fix=fix)
            )
        # A save may be under way; a restart from the one before it would lose more updates.
        checkpoints.wait()
        snapshot = self.callbacks.load_latest(
            self.spec.make_server(donate=False), jax.device_put(self.job.params)
        )
        if snapshot is None:
            fix = "save more often, or run again."
            raise ServerLostError(
                format_error(caller, f"{problem} before its first checkpoint.", fix=fix)
            )
        version = int(snapshot.state.step)
        self.lost_updates += max(0, self.last_version - version)
        _LOG.warning("%s: the server was killed; it restarts at version %d.", caller, version)
        self.start_server(snapshot)
        self.start_work()

    def call(self, name: str, *arguments: object) -> Any:
        """Call a method of the coordinator."""
        return ray.get(self.server.call.remote(name, *arguments))

    def status(self) -> Status:
        """Return the current activity of every worker."""
        return self.call("status")

    def notify(self, name: str, *arguments: object, **options: object) -> None:
        """Call a method of the coordinator if the server is alive."""
        with contextlib.suppress(RayActorError):  # the workers notice, and `watch` returns False
            ray.get(self.server.call.remote(name, *arguments, **options))

    def is_server_alive(self) -> bool:
        """Return whether the server answers."""
        with contextlib.suppress(RayActorError):
            self.call("end_reason")
            return True
        return False


def check_token(run_token: str, call_token: str) -> None:
    """Refuse a call without the token of the run.

    Raises:
      PermissionError: if the call has another token.
    """
    if not hmac.compare_digest(run_token.encode(), str(call_token).encode()):
        problem = "a call without the token of this run was refused."
        raise PermissionError(
            format_error("parameter_server", problem, fix="start workers through opt.run only.")
        )


class ProcessFailure(NamedTuple):
    """The answer of a process that has failed: its error, and the traceback as text."""

    error: BaseException
    trace: str


class CoordinatorError(Exception):
    """The server's process has died.

    Or, with `failure`, its answer was an error, which ends the run.
    """

    def __init__(self, failure: ProcessFailure | None = None):
        super().__init__()
        self.failure = failure


class ServerLostReport(NamedTuple):
    """The answer of a worker that could not reach the server: the newest version that the worker
    knows.
    """

    version: int


class ServerProcess:
    """A `Coordinator` in its own process.

    Parameters go to the workers through Ray's object store.
    """

    def __init__(self, settings: dict[str, object], token: str, start: bytes):
        # On CPU: accelerators belong to the processes of the workers.
        begin_process(settings, devices=1, platform="cpu")
        spec, job, policy, snapshot = cloudpickle.loads(start)
        began = time.perf_counter()
        self.token = token
        run = AsyncRun(
            spec.make_server(donate=True),
            job.params,
            spec.settings(job.key),
            lambda: time.perf_counter() - began,
        )
        if snapshot is not None:
            restore_run(spec.caller, run, snapshot)
        self.coordinator = Coordinator(run, job.num_updates, job.workers, policy)
        # a version, and the reference to its parameters
        self.shared_params: tuple[int, ObjectRef | None] = (-1, None)
        self.share_lock = threading.Lock()

    def enter(self, token: str, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        check_token(self.token, token)
        return self.coordinator.enter(worker, incarnation)

    def pull(self, token: str, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """See `Coordinator.pull`.

        The parameters are a reference into the object store, one for each version.
        """
        check_token(self.token, token)
        task = self.coordinator.pull(worker, incarnation, ready)
        return None if task is None else task._replace(params=self._share_params(task))

    def push(
        self, token: str, worker: int, incarnation: int, update: Update, version: int
    ) -> tuple[bool, int] | ProcessFailure:
        """See `Coordinator.push`.

        The version is returned too, and an error is returned as a `ProcessFailure`.
        """
        check_token(self.token, token)
        try:
            goes_on = self.coordinator.push(worker, incarnation, update, version)
            return goes_on, self.coordinator.run.state.version
        except Exception as error:
            return ProcessFailure(error, traceback.format_exc())

    def call(self, name: str, *arguments: object, **options: object) -> Any:
        """Call another method of the coordinator."""
        return getattr(self.coordinator, name)(*arguments, **options)

    def next_milestone(self, timeout: float) -> Milestone | None:
        """See `Coordinator.next_milestone`; arrays are numpy arrays."""
        return jax.device_get(self.coordinator.next_milestone(timeout))

    def clock_of(self, worker: int) -> int | None:
        """Return the number of steps that a worker has finished.

        None if the worker has not joined.
        """
        return self.coordinator.run.state.clock.steps.get(worker)

    def log(self) -> Log:
        """Return the log so far."""
        with self.coordinator.changed:
            return self.coordinator.run.log

    def finish(
        self, metrics: dict[str, object], with_snapshot: bool
    ) -> tuple[AsyncResult, RunSnapshot | None]:
        """Return the result, and a snapshot if asked for, as numpy arrays."""
        run = self.coordinator.run
        result = run.finish(self.coordinator.end_reason(), **metrics)
        snapshot = jax.device_get(take_snapshot(run)) if with_snapshot else None
        return result._replace(params=jax.device_get(result.params)), snapshot

    def _share_params(self, task: WorkerTask) -> list[ObjectRef | None]:
        """Return a reference to the parameters."""
        with self.share_lock:
            if self.shared_params[0] != task.version:
                # Once a version, not once a pull: workers that pull the same version read the same
                # object.
                self.shared_params = task.version, ray.put(jax.device_get(task.params))
            # in a list, or Ray would send the parameters themselves
            return [self.shared_params[1]]


class WorkerProcess:
    """The process of a worker; its programs stay compiled when the server restarts."""

    def __init__(self, settings: dict[str, object], token: str, devices: int):
        begin_process(settings, devices=devices)
        self.token = token
        self.compute: WorkerCompute | None = None

    def work(
        self, server: ActorHandle, pickled_compute: bytes, worker: int, incarnation: int
    ) -> ServerLostReport | ProcessFailure | None:
        """Work until the run ends; return the failure that ended it, or None.

        `incarnation` says how often the worker was restarted.
        """
        coordinator = RemoteCoordinator(server, self.token)
        try:
            compute = self.compute
            if compute is None:
                make_compute, batches_of, key = cloudpickle.loads(pickled_compute)
                compute = self.compute = make_compute(batches_of, key, worker)
            run_worker(coordinator, compute, worker, incarnation)
        except CoordinatorError as error:
            return error.failure or ServerLostReport(coordinator.version)
        except Exception as error:
            return ProcessFailure(error, traceback.format_exc())
        return None


class RemoteCoordinator:
    """The client by which a worker's process calls the coordinator in the server's process."""

    def __init__(self, server: ActorHandle, token: str):
        self.server = server
        self.token = token
        self.version = 0

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._get(self.server.enter.remote(self.token, worker, incarnation))

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """See `Coordinator.pull`."""
        task: WorkerTask | None = self._get(
            self.server.pull.remote(self.token, worker, incarnation, ready)
        )
        if task is None:
            return None
        self.version = max(self.version, task.version)
        return task._replace(params=self._get(task.params[0]))

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """See `Coordinator.push`.

        The update is one message, which arrives completely or not at all.
        """
        assert update is not None
        # Complete before it is sent: a worker that dies while it computes sends nothing.
        message = jax.device_get(update._replace(rows=None))._replace(rows=update.rows)
        answer = self._get(
            self.server.push.remote(self.token, worker, incarnation, message, version)
        )
        if isinstance(answer, ProcessFailure):
            raise CoordinatorError(answer)
        self.version = max(self.version, answer[1])
        return answer[0]

    def _get(self, reference: ObjectRef) -> Any:
        try:
            return ray.get(reference)
        except (RayActorError, ObjectLostError) as error:
            raise CoordinatorError from error
