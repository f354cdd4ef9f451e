"""The two kinds of processes of a run on Ray: the server, and a worker, each with a JAX runtime of its own."""

import os
import threading
import time
import traceback
from typing import Any, NamedTuple

import jax

from shardopt.parameter_server.coordinator import Coordinator, Milestone, Task
from shardopt.parameter_server.run import Run
from shardopt.parameter_server.saving import Snapshot, restore_run, snapshot
from shardopt.parameter_server.threads import use_settings
from shardopt.parameter_server.worker import Compute, run_worker


class Failed(NamedTuple):
    """What a process says instead of a result: the error, and its traceback as text."""

    error: BaseException
    trace: str


class ServerLost(NamedTuple):
    """What a worker says when the server is gone: the newest version that it knew of."""

    version: int


class ServerProcess:
    """A `Hall` in a process of its own; parameters go to workers through the object store."""

    def __init__(self, settings: dict[str, Any], spec: bytes):
        from ray import cloudpickle

        begin_process(settings, devices=1, platform="cpu")
        what = cloudpickle.loads(spec)
        began = time.perf_counter()
        run = Run(what["make_server"](True), what["params"], what["header"], lambda: time.perf_counter() - began)
        if what["snapshot"] is not None:
            restore_run(what["who"], run, Snapshot(*what["snapshot"]))
        wishes = what["wishes"]
        self.hall = Coordinator(run, what["num_updates"], what["presence"], wishes.wanted, wishes.keep)
        self.shared: tuple[int, Any] = (-1, None)
        self.sharing = threading.Lock()

    def enter(self, worker: int, life: int) -> int | None:
        """See `Hall.enter`."""
        return self.hall.enter(worker, life)

    def pull(self, worker: int, life: int, ready: bool) -> Task | None:
        """See `Hall.pull`; the parameters are a reference into the object store, one a version."""
        task = self.hall.pull(worker, life, ready)
        return None if task is None else task._replace(params=self._share(task))

    def push(self, worker: int, life: int, update: Any, version: int) -> tuple[bool, int] | Failed:
        """See `Hall.push`; says the version as well."""
        try:
            goes_on = self.hall.push(worker, life, update, version)
            return goes_on, self.hall.run.state.version
        except Exception as error:
            return Failed(error, traceback.format_exc())

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call another method of the hall."""
        return getattr(self.hall, name)(*arguments, **options)

    def milestone(self, timeout: float) -> Milestone | None:
        """See `Hall.milestone`; as numpy arrays."""
        found = self.hall.milestone(timeout)
        return found if found is None else jax.device_get(found)

    def clock_of(self, worker: int) -> int | None:
        """Return the steps that a worker has finished, None if it is not there."""
        return self.hall.run.state.clock.steps.get(worker)

    def log(self) -> Any:
        """Return the log so far."""
        with self.hall.changed:
            return self.hall.run.log

    def finish(self, metrics: dict[str, Any], keep: bool) -> tuple[Any, Any]:
        """Return the result, and a snapshot if it is to be kept, as numpy arrays."""
        result = self.hall.run.finish(self.hall.why(), **metrics)
        kept = jax.device_get(tuple(snapshot(self.hall.run))) if keep else None
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

    def work(self, server: Any, worker: int, life: int, spec: bytes) -> ServerLost | Failed | None:
        """Live through a run; say what ended it, None for its end."""
        from ray import cloudpickle

        hall = RemoteHall(server)
        try:
            compute = self.compute
            if compute is None:
                make, batches_of, key = cloudpickle.loads(spec)
                compute = self.compute = make(batches_of, key, worker)
            run_worker(hall, compute, worker, life)
        except _Gone:
            return ServerLost(hall.version)
        except _AtServer as error:
            return error.failed
        except Exception as error:
            return Failed(error, traceback.format_exc())
        return None


class RemoteHall:
    """The hall as a worker in another process sees it."""

    def __init__(self, server: Any):
        self.server, self.version = server, 0

    def enter(self, worker: int, life: int) -> int | None:
        """See `Hall.enter`."""
        return self._get(self.server.enter.remote(worker, life))

    def pull(self, worker: int, life: int, ready: bool) -> Task | None:
        """See `Hall.pull`."""
        task = self._get(self.server.pull.remote(worker, life, ready))
        if task is None:
            return None
        self.version = max(self.version, task.version)
        return task._replace(params=self._get(task.params[0]))

    def push(self, worker: int, life: int, update: Any, version: int) -> bool:
        """See `Hall.push`; one message, which arrives whole or not at all."""
        arrays = jax.device_get(update._replace(rows=None))._replace(rows=update.rows)
        found = self._get(self.server.push.remote(worker, life, arrays, version))
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
