"""A run on Ray: server and workers are processes; the caller starts them and looks after them.

`RayDriver` is the caller's side: who died, who is started again, what is saved. `ServerProcess` and `WorkerProcess` are
the two kinds of processes, each with a JAX runtime of its own.
"""

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.apply import PartPrograms
from shardopt.parameter_server.callbacks import Callbacks
from shardopt.parameter_server.coordinator import Coordinator, Milestone, Task
from shardopt.parameter_server.fragments import Part
from shardopt.parameter_server.log import Log
from shardopt.parameter_server.ray_groups import Failed, Follower, Gone, Leader, free_address
from shardopt.parameter_server.ray_servers import TRIES, RayServers, RemoteParams, check_token
from shardopt.parameter_server.run import (
    AsyncResult,
    Compute,
    Job,
    MakeServer,
    Run,
    RunSpec,
    Snapshot,
    restore_run,
    snapshot,
)
from shardopt.parameter_server.settings import settings_values, use_settings
from shardopt.parameter_server.sharded import merged, shard, unshard
from shardopt.parameter_server.updates import Update
from shardopt.parameter_server.views import Status, show_workers
from shardopt.parameter_server.worker import Streams, no_compute, run_worker
from shardopt.runtime.processes import initialize

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


_LOG = logging.getLogger(__name__)


class ServerLostError(RuntimeError):
    """The process of the server was killed, and there is nothing to go on from."""


class WorkersLostError(RuntimeError):
    """Every worker was killed."""


def run_on_ray(spec: RunSpec, job: Job, callbacks: Callbacks) -> AsyncResult:
    """Do a run, and leave nothing running."""
    Streams(spec.who, job.batches_of)  # checks it
    with cluster(spec.who, spec.address, spec.num_workers * spec.hosts + _more_processes(spec)) as ray:
        job = job._replace(params=jax.device_put(job.params))
        found = callbacks.latest(spec.make_server(donate=False), job.params)
        callbacks.resumed_from = callbacks.saved = None if found is None else int(found.state.step)
        driver = RayDriver(ray, spec, job, callbacks)
        log = None
        try:
            with show_workers(spec.who, shown=callbacks.progress) as callbacks.show:
                result = driver.run(found)
            log = result.log
            return result
        finally:
            log = driver.log() if log is None else log
            driver.close()
            if job.log_path is not None and log is not None:
                log.save(job.log_path)


def _more_processes(spec: RunSpec) -> int:
    """Return how many processes there are besides workers and coordinator."""
    return spec.servers if spec.servers > 1 else 0


_CONNECT_SECONDS = 5.0
"""How long an address may take to answer; Ray itself would try for minutes."""


@contextlib.contextmanager
def cluster(who: str, address: str | None, num_workers: int) -> Iterator[ModuleType]:
    """Return the module `ray`, connected: to what is there, an address, or a local Ray that ends with the run."""
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
        options = {"num_cpus": num_workers + 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        with warnings.catch_warnings():
            # jax warns of forks; what Ray forks becomes another program at once.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            ray.init(log_to_driver=False, **options)
    else:
        _connect(who, ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(who: str, ray: ModuleType, address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():
            with contextlib.closing(socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)):
                pass
        ray.init(address=address, log_to_driver=False)
    except (OSError, ConnectionError, ValueError, RuntimeError) as error:
        what = f"no Ray answers at {address!r} ({type(error).__name__}: {str(error).splitlines()[0]})."
        fix = "start Ray there (ray start --head), correct the address, or leave it out for a local Ray."
        raise ConnectionError(format_error(who, what, fix=fix)) from error


def check_capacity(who: str, ray: ModuleType, num_workers: int, servers: int = 1, hosts: int = 1) -> None:
    """Refuse a cluster on which the processes would wait for ever to be started."""
    there = ray.cluster_resources().get("CPU", 0)
    needed = num_workers * hosts + 1 + (servers if servers > 1 else 0)
    if there < needed:
        others = "a server" if servers == 1 else f"{servers} servers and their coordinator"
        each = "" if hosts == 1 else f" of {hosts} processes each"
        what = f"{num_workers} workers{each} and {others} need {needed} CPUs, and the Ray cluster has {there:g}."
        fix = "start it with more (ray.init(num_cpus=...)), or use fewer workers."
        raise ValueError(format_error(who, what, fix=fix))


_LULL_SECONDS = 10.0
"""How long the death of a process may come to light after the failure of another that missed it."""
_POLL_SECONDS = 0.5
"""How long the caller waits for a milestone before it looks after the workers again."""
_COMPILES = 10
"""How many times as long a worker may take that has pushed nothing since it joined."""


class RayDriver:
    """The processes of a run, as the caller sees them."""

    def __init__(self, ray: ModuleType, spec: RunSpec, job: Job, callbacks: Callbacks):
        check_capacity(spec.who, ray, spec.num_workers, spec.servers, spec.hosts)
        self.token = secrets.token_hex()
        self.ray, self.spec, self.job, self.callbacks = ray, spec, job, callbacks
        self.settings = settings_values()
        self.work = ray.cloudpickle.dumps((spec.make_compute, job.batches_of, job.key))
        self.gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.alive: dict[
            int, tuple[ActorHandle, ...]
        ] = {}  # the processes of each worker; the first one asks the server
        self.restarts = dict.fromkeys(job.availability, spec.max_restarts)
        self.killed: list[int] = []
        self.hung: list[int] = []
        # what each worker was doing when it was looked at, and since when
        self.marks: dict[int, tuple[object, float]] = {}
        self.kept_waiting = 0.0  # for how many seconds workers may have waited for evaluations and checkpoints
        self.seen, self.lost_updates = 0, 0
        self.server: Any = None
        self.working: dict[ObjectRef, tuple[int, int]] = {}  # worker, and which of its processes

    def run(self, found: Snapshot | None) -> AsyncResult:
        """Train; whatever happens, `close` must be called."""
        self.start_server(found)
        for worker in self.job.availability:
            self.start_worker(worker)
        self.send_to_work()
        while not self.stand_by():
            self.restart_server()
        why, keep = self.call("why"), self.callbacks.checkpoints is not None
        all_died = why == "exhausted" and not self.alive
        more = {"killed": self.killed, "hung": self.hung, "lost_updates": self.lost_updates, **self.callbacks.metrics()}
        result, kept = self.ray.get(self.server.finish.remote(more, keep))
        self.callbacks.finish(kept)
        if all_died:
            what = f"all {len(self.job.availability)} workers were killed, the last one at version"
            what += f" {result.metrics['updates']} of {self.job.num_updates}."
            fix = "pass max_restarts so that they are started again, or checkpoints to go on from here."
            error = WorkersLostError(format_error(self.spec.who, what, fix=fix))
            error.add_note(f"Killed, in this order: {self.killed}.")
            raise error
        return result._replace(params=jax.device_put(result.params))

    def close(self) -> None:
        """Leave nothing running."""
        workers = [actor for group in self.alive.values() for actor in group]
        for actor in [*workers, *([] if self.server is None else [self.server])]:
            self.ray.kill(actor)

    def log(self) -> Log | None:
        """Return the log so far, None if the server is gone."""
        try:
            return None if self.server is None else self.ray.get(self.server.log.remote(), timeout=10)
        except self.ray.exceptions.RayError:
            return None

    def start_server(self, found: Snapshot | None) -> None:
        """Start the server, from a checkpoint or from the beginning."""
        params, found = jax.device_get((self.job.params, found))
        job = self.job._replace(params=params, batches_of=lambda _: (), log_path=None)
        if self.server is not None:  # whoever is dead for good is not waited for
            job = job._replace(availability={worker: job.availability[worker] for worker in self.alive})
        # Loss and data stay out of the server.
        programs = self.ray.cloudpickle.dumps(partial(programs_of, self.spec.make_server))
        start = self.spec._replace(make_compute=no_compute), job, self.callbacks.policy, found, programs
        # Every worker may wait in a call of its own, and calls of killed ones end only when they are noticed.
        process = self.ray.remote(ServerProcess).options(num_cpus=1, max_concurrency=4 * self.spec.num_workers + 8)
        self.server = process.remote(self.settings, self.token, self.ray.cloudpickle.dumps(start))
        self.incarnations = dict.fromkeys(self.job.availability, 0)

    def start_worker(self, worker: int) -> None:
        """Start a worker's processes."""
        devices, hosts = self.spec.devices[worker], self.spec.hosts
        how: dict[str, Any] = {"num_cpus": 1, "num_gpus": devices if self.gpus else 0}
        if hosts > 1:  # one thread works, another hears what the first process tells the others
            how |= {"max_concurrency": 2, "scheduling_strategy": "SPREAD"}
        process = self.ray.remote(WorkerProcess).options(**how)
        arguments = self.settings, self.token, devices, self.spec.servers
        self.alive[worker] = tuple(process.remote(*arguments) for _ in range(hosts))

    def send_to_work(self) -> None:
        """Let every worker that is idle and alive work."""
        busy = {worker for worker, _ in self.working.values()}
        for worker, group in self.alive.items():
            if worker in busy:
                continue
            address = group[0].address.remote(self.token) if len(group) > 1 else ""
            for rank, actor in enumerate(group):
                others = group[1:] if rank == 0 else ()
                place = address, len(group), rank, *others
                work = actor.work.remote(self.server, worker, self.incarnations[worker], self.work, *place)
                self.working[work] = worker, rank

    def stand_by(self) -> bool:
        """Look after the run until nobody works any more; say False if that is because the server is gone."""
        milestone, server_lost = self.server.milestone.remote(_POLL_SECONDS), False
        while self.working:
            waiting = [*self.working] if server_lost else [*self.working, milestone]
            ready, _ = self.ray.wait(waiting, num_returns=1)
            if ready[0] in self.working:
                server_lost |= self.ended(ready[0], *self.working.pop(ready[0]))
            else:
                try:
                    self.reached(self.ray.get(milestone))
                    self.callbacks.show(self.status)
                    self.end_those_that_hang()
                    milestone = self.server.milestone.remote(_POLL_SECONDS)
                except self.ray.exceptions.RayActorError:
                    server_lost = True
        if server_lost or not self.server_alive():
            return False
        self.reached(self.ray.get(milestone))  # what was in flight when the last worker ended
        while not self.callbacks.idle and (found := self.ray.get(self.server.milestone.remote(_POLL_SECONDS))):
            self.reached(found)
        self.callbacks.show(self.status, last=True)
        return True

    def reached(self, milestone: Milestone | None) -> None:
        """Evaluate, save, stop early."""
        if milestone is not None:
            began = time.monotonic()
            self.seen = max(self.seen, milestone.version)
            if self.callbacks.handle(milestone):
                self.call("finish_early")
            self.kept_waiting += time.monotonic() - began

    def end_those_that_hang(self) -> None:
        """Kill the workers that have begun nothing new for `hang_timeout` seconds, and that nobody keeps waiting."""
        timeout = self.spec.hang_timeout
        if timeout is None:
            return
        now = time.monotonic() - self.kept_waiting
        for one in self.status().workers:
            what = one.doing, one.clock, one.pushes, self.incarnations[one.worker]
            mark, since = self.marks.get(one.worker, (None, now))
            if what != mark or one.doing in ("waits", "gone"):
                self.marks[one.worker] = what, now
            elif now - since > timeout * (_COMPILES if one.is_new else 1) and one.worker in self.alive:
                _LOG.warning(
                    "%s: worker %d hangs: it %s without progress for %.0f s, at its step %d; its processes are killed.",
                    *(self.spec.who, one.worker, one.doing, now - since, one.clock),
                )
                self.hung.append(one.worker)
                self.died(one.worker)

    def ended(self, reference: "ObjectRef", worker: int, rank: int) -> bool:
        """Take note of how the work of a worker's process ended; say whether the server is gone."""
        try:
            outcome = self.ray.get(reference)
        except self.ray.exceptions.RayActorError:
            self.died(worker)
            return False
        if isinstance(outcome, ServerLost):  # others than the first process are told by it
            self.seen = max(self.seen, outcome.version)
            return rank == 0
        if isinstance(outcome, Failed):
            if self.lost_a_process(worker):  # which is why this one failed
                self.died(worker)
                return False
            at = self.ray.get(self.server.clock_of.remote(worker)) if self.server_alive() else None
            step = "" if at is None else f" at its step {at}"
            outcome.error.add_note(f"This happened in worker {worker} of {self.spec.who}{step}, a process of its own:")
            outcome.error.add_note(outcome.trace)
            raise outcome.error
        if rank == 0:
            self.tell("done", worker)
        return False

    def lost_a_process(self, worker: int) -> bool:
        """Say whether another process of a worker has died, or dies shortly after one has failed."""
        others = [work for work, (of, _) in self.working.items() if of == worker]
        ended, _ = self.ray.wait(others, num_returns=len(others), timeout=_LULL_SECONDS) if others else ([], [])
        for work in ended:
            try:
                self.ray.get(work)
            except self.ray.exceptions.RayActorError:
                return True
        return False

    def died(self, worker: int) -> None:
        """A worker was killed, or one of its processes, and so all: the clock forgets it, and it is started again if it may."""
        self.killed.append(worker)
        for actor in self.alive.pop(worker):
            self.ray.kill(actor)
        self.working = {work: where for work, where in self.working.items() if where[0] != worker}
        again = self.restarts[worker] > 0
        self.tell("worker_died", worker, expected=again)
        self.incarnations[worker] += 1
        if again:
            self.restarts[worker] -= 1
            self.start_worker(worker)
            self.send_to_work()

    def restart_server(self) -> None:
        """Start the server again from its last checkpoint, and send the workers there."""
        checkpoints, who = self.callbacks.checkpoints, self.spec.who
        what = f"the process of the server was killed, at version {self.seen} or later,"
        if checkpoints is None:
            fix = "pass checkpoints=so.Checkpoints(folder, every=..., keep=...)."
            raise ServerLostError(format_error(who, f"{what} and no checkpoints were kept.", fix=fix))
        checkpoints.wait()
        found = self.callbacks.latest(self.spec.make_server(donate=False), jax.device_put(self.job.params))
        if found is None:
            fix = "save more often, or run again."
            raise ServerLostError(format_error(who, f"{what} before its first checkpoint.", fix=fix))
        self.lost_updates += max(0, self.seen - int(found.state.step))
        self.start_server(found)
        self.send_to_work()

    def call(self, name: str, *arguments: object) -> Any:
        """Call a method of the coordinator."""
        return self.ray.get(self.server.call.remote(name, *arguments))

    def status(self) -> Status:
        """Return who is doing what."""
        return self.call("status")

    def tell(self, name: str, *arguments: object, **options: object) -> None:
        """Call a method of the coordinator, which may be gone."""
        with contextlib.suppress(self.ray.exceptions.RayActorError):  # the workers notice, and `stand_by` says so
            self.ray.get(self.server.call.remote(name, *arguments, **options))

    def server_alive(self) -> bool:
        """Say whether the server answers."""
        try:
            self.call("why")
            return True
        except self.ray.exceptions.RayActorError:
            return False


def programs_of(make_server: MakeServer) -> PartPrograms | None:
    """Return what one of several servers does."""
    return make_server(donate=True).programs


class ServerLost(NamedTuple):
    """What a worker says when the server is gone: the newest version that it knew of."""

    version: int


class ServerProcess:
    """A `Coordinator` in a process of its own; parameters go to workers through the object store."""

    def __init__(self, settings: dict[str, object], token: str, start: bytes):
        from ray import cloudpickle

        begin_process(settings, devices=1, platform="cpu")
        spec, job, policy, found, programs = cloudpickle.loads(start)
        began = time.perf_counter()
        header = spec.settings(job.key)
        server, self.servers = spec.make_server(donate=True), None
        if server.programs is not None:
            self.servers = RayServers(begin_process, settings, token, programs, spec.servers, server.programs.has_sums)
            server = spec.make_server(donate=True, mathematics=self.servers.mathematics())
        self.token, self.given = token, {}
        run = Run(server, job.params, header, lambda: time.perf_counter() - began)
        if found is not None:
            restore_run(spec.who, run, found)
        self.coordinator = Coordinator(run, job.num_updates, job.availability, policy)
        self.shared: tuple[int, dict[int | None, ObjectRef]] = (-1, {})
        self.fresh: set[int] = set()  # who is to get all parameters, not a fragment
        self.sharing = threading.Lock()

    def enter(self, token: str, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        check_token(self.token, token)
        self.fresh.add(worker)
        return self.coordinator.enter(worker, incarnation)

    def pull(self, token: str, worker: int, incarnation: int, ready: bool) -> Task | None:
        """See `Coordinator.pull`; the parameters are references into the object store, one a version and server."""
        check_token(self.token, token)
        task = self.coordinator.begin_step(worker, incarnation, ready)
        if task is None or self.servers is None:
            return None if task is None else task._replace(params=self._share(task, worker))
        self.given[worker] = task.params
        return task

    def pull_again(self, token: str, worker: int) -> "list[ObjectRef]":
        """Return references to what the worker has pulled, once the servers that are gone are there again."""
        check_token(self.token, token)
        assert self.servers is not None
        self.servers.revive()
        return self.given[worker].version.refs

    def push(
        self, token: str, worker: int, incarnation: int, update: Update, version: int
    ) -> tuple[bool, int] | Failed:
        """See `Coordinator.push`; says the version as well."""
        check_token(self.token, token)
        try:
            if self.servers is not None:
                update = update._replace(grads=self.servers.hold(update.grads))
            goes_on = self.coordinator.push(worker, incarnation, update, version)
            return goes_on, self.coordinator.run.state.version
        except Exception as error:
            return Failed(error, traceback.format_exc())

    def call(self, name: str, *arguments: object, **options: object) -> Any:
        """Call another method of the coordinator."""
        return getattr(self.coordinator, name)(*arguments, **options)

    def milestone(self, timeout: float) -> Milestone | None:
        """See `Coordinator.milestone`; as numpy arrays."""
        return jax.device_get(self.coordinator.milestone(timeout))

    def clock_of(self, worker: int) -> int | None:
        """Return the steps that a worker has finished, None if it is not there."""
        return self.coordinator.run.state.clock.steps.get(worker)

    def log(self) -> Log:
        """Return the log so far."""
        with self.coordinator.changed:
            return self.coordinator.run.log

    def finish(self, metrics: dict[str, object], keep: bool) -> tuple[AsyncResult, Snapshot | None]:
        """Return the result, and a snapshot if it is to be kept, as numpy arrays."""
        run = self.coordinator.run
        if self.servers is not None:
            metrics = {**metrics, "killed_servers": self.servers.killed}
        result = run.finish(self.coordinator.why(), **metrics)
        kept = jax.device_get(snapshot(run)) if keep else None
        return result._replace(params=jax.device_get(result.params)), kept

    def _share(self, task: Task, worker: int) -> "list[ObjectRef]":
        """Return a reference to the parameters; of fragments to that which the worker pushed last, once it has all."""
        import ray

        fragments, params, number = self.coordinator.run.server.fragments, task.params, None
        with self.sharing:
            if fragments is not None and worker not in self.fresh:
                number = (task.clock - 1) % fragments.num_fragments
                params = Part(fragments.take(params, number), number)
            self.fresh.discard(worker)
            if self.shared[0] != task.version:
                self.shared = (task.version, {})
            references = self.shared[1]
            if number not in references:
                references[number] = ray.put(jax.device_get(params))
            return [references[number]]  # in a list, or Ray would send the parameters themselves


class WorkerProcess:
    """A worker, or one process of it; its programs stay compiled when the server comes back."""

    def __init__(self, settings: dict[str, object], token: str, devices: int, servers: int):
        begin_process(settings, devices=devices)
        self.token, self.servers = token, servers
        self.compute: Compute | None = None
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def address(self, token: str) -> str:
        """Return where the other processes of its group find this one."""
        check_token(self.token, token)
        return free_address()

    def hear(self, token: str, answer: object) -> None:
        """Take what the first process of the group was told."""
        check_token(self.token, token)
        self.heard.put(answer)

    def work(
        self,
        server: "ActorHandle",
        worker: int,
        incarnation: int,
        work: bytes,
        address: str,
        count: int,
        rank: int,
        *others: "ActorHandle",
    ) -> ServerLost | Failed | None:
        """Work through a run, as process `rank` of `count`; say what ended it, None for its end."""
        from ray import cloudpickle

        coordinator = RemoteCoordinator(server, self.token, self.servers) if rank == 0 else Follower(self.heard)
        try:
            compute = self.compute
            if compute is None:
                if count > 1:
                    initialize(address, count, rank)
                make_compute, batches_of, key = cloudpickle.loads(work)
                compute = self.compute = make_compute(batches_of, key, worker)
            asks = Leader(coordinator, self.token, others) if others else coordinator
            run_worker(asks, compute, worker, incarnation)
        except Gone as error:
            return error.failed or ServerLost(coordinator.version)
        except Exception as error:
            return Failed(error, traceback.format_exc())
        return None


class RemoteCoordinator:
    """The coordinator as a worker in another process sees it."""

    def __init__(self, server: "ActorHandle", token: str, servers: int):
        self.server, self.token, self.servers, self.version = server, token, servers, 0

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._get(self.server.enter.remote(self.token, worker, incarnation))

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """See `Coordinator.pull`."""
        task: Task | None = self._get(self.server.pull.remote(self.token, worker, incarnation, ready))
        if task is None:
            return None
        self.version = max(self.version, task.version)
        if isinstance(task.params, RemoteParams):
            return task._replace(params=self._from_servers(worker, task.params))
        return task._replace(params=self._get(task.params[0]))

    def _from_servers(self, worker: int, params: RemoteParams) -> PyTree:
        import ray
        from ray.exceptions import RayError

        refs, tries = params.version.refs, 0
        while True:
            try:
                return merged(unshard(ray.get(refs), params.shapes), params.rest)
            except RayError:
                tries += 1
                if tries > TRIES:
                    raise
                refs = self._get(self.server.pull_again.remote(self.token, worker))

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """See `Coordinator.push`; one message, which arrives whole or not at all."""
        assert update is not None
        arrays = jax.device_get(update._replace(rows=None))._replace(rows=update.rows)
        if self.servers > 1:
            arrays = arrays._replace(grads=[self._put(part) for part in shard(arrays.grads, self.servers)])
        found = self._get(self.server.push.remote(self.token, worker, incarnation, arrays, version))
        if isinstance(found, Failed):
            raise Gone(found)
        self.version = max(self.version, found[1])
        return found[0]

    def _put(self, part: PyTree) -> "ObjectRef":
        import ray

        return ray.put(part)

    def _get(self, reference: "ObjectRef") -> Any:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError

        try:
            return ray.get(reference)
        except (RayActorError, ObjectLostError) as error:
            raise Gone from error


def begin_process(settings: dict[str, object], *, devices: int, platform: str | None = None) -> None:
    """Set up jax in a fresh process as it is set up in the caller's, with so many devices if they are CPUs."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    use_settings(settings)
