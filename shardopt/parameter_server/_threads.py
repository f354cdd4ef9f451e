"""Workers as threads of this process, each on its own devices."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import jax

from shardopt.parameter_server._callbacks import Callbacks
from shardopt.parameter_server._coordinator import Coordinator
from shardopt.parameter_server._run import (
    AsyncJob,
    AsyncResult,
    AsyncRun,
    RunSpec,
    WorkerCompute,
    take_snapshot,
)
from shardopt.parameter_server._server import ParameterServer
from shardopt.parameter_server._settings import capture_settings
from shardopt.parameter_server._worker import run_worker


def run_on_threads(
    spec: RunSpec, server: ParameterServer, job: AsyncJob, callbacks: Callbacks
) -> AsyncResult:
    """Train on threads.

    `server` is `spec.make_server(donate=True)`, whose programs stay compiled from run to run.
    """
    compute = spec.make_compute(job.batches_of, job.key)
    began = time.perf_counter()
    params = jax.device_put(job.params, compute.device)
    run = AsyncRun(server, params, spec.settings(job.key), lambda: time.perf_counter() - began)
    callbacks.begin(run, params)
    if job.log_path is not None:
        # so that a path that cannot be written is noticed before the training
        run.log.save(job.log_path)
    try:
        coordinator = Coordinator(run, job.num_updates, job.workers, callbacks.policy)
        run_threads(spec.caller, coordinator, compute, callbacks.watch)
        result = run.finish(coordinator.end_reason(), **callbacks.metrics())
        callbacks.finish(None if callbacks.checkpoints is None else take_snapshot(run))
        return result
    finally:
        if job.log_path is not None:
            run.log.save(job.log_path)


def run_threads(
    caller: str,
    coordinator: Coordinator,
    compute: WorkerCompute,
    watch: Callable[[Coordinator], None],
) -> None:
    """Run the worker threads until the run is over.

    However it ends, every thread has ended when this returns.

    `watch(coordinator)` handles milestones on the caller's thread until all workers have ended. An
    error that a worker raised is raised here, with its traceback and a note that names the worker.
    """
    if coordinator.is_over():
        return
    settings = capture_settings()
    errors = []

    def work(worker: int) -> None:
        try:
            with settings():
                run_worker(coordinator, compute, worker)
        except BaseException as error:  # it is raised again on the caller's thread
            steps = coordinator.run.state.clock.steps
            at_step = f" at its step {steps[worker]}" if worker in steps else ""
            error.add_note(f"This happened in worker {worker} of {caller}{at_step}.")
            # The first one counts. Others may follow from it, such as a worker whose run was
            # stopped.
            errors.append(error)
            coordinator.stop("failed")
        finally:
            coordinator.worker_ended(worker)

    workers = sorted(coordinator.running_workers)
    with ThreadPoolExecutor(len(workers), thread_name_prefix="shardopt-worker") as threads:
        try:
            ended = [threads.submit(work, worker) for worker in workers]
            watch(coordinator)
            wait(ended)
        except BaseException:  # Ctrl-C reaches the main thread only
            coordinator.stop("failed")
            raise
    if errors:
        raise errors[0]
