"""Workers as threads of this process, each with devices of its own."""

import threading
import time
from collections.abc import Callable

from shardopt.parameter_server.callbacks import Callbacks
from shardopt.parameter_server.coordinator import Coordinator
from shardopt.parameter_server.run import AsyncResult, Compute, Job, Run, RunSpec, snapshot
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.settings import settings_here
from shardopt.parameter_server.views import show_workers
from shardopt.parameter_server.worker import run_worker


def run_on_threads(spec: RunSpec, server: Server, job: Job, callbacks: Callbacks) -> AsyncResult:
    """Do a run; `server` is `spec.make_server(donate=True)`, whose programs stay compiled from run to run."""
    compute = spec.make_compute(job.batches_of, job.key)
    began = time.perf_counter()
    params = compute.on_server(job.params)
    run = Run(server, params, spec.settings(job.key), lambda: time.perf_counter() - began)
    callbacks.begin(run, params)
    if job.log_path is not None:
        run.log.save(job.log_path)  # or a path that cannot be written would be noticed when all is done
    try:
        coordinator = Coordinator(run, job.num_updates, job.availability, callbacks.policy)
        with show_workers(spec.who, shown=callbacks.progress) as callbacks.show:
            run_threads(spec.who, coordinator, compute, callbacks.watch)
        result = run.finish(coordinator.why(), **callbacks.metrics())
        callbacks.finish(None if callbacks.checkpoints is None else snapshot(run))
        return result
    finally:
        if job.log_path is not None:
            run.log.save(job.log_path)


def run_threads(who: str, coordinator: Coordinator, compute: Compute, watch: Callable[[Coordinator], None]) -> None:
    """Work until all is over. Whatever ends it, every thread has ended when this returns.

    `watch(coordinator)` takes milestones away until nobody works, on the caller's thread. What a worker raised is
    raised here, with its traceback and a note saying which worker it was.
    """
    settings, errors = settings_here(), []

    def work(worker: int) -> None:
        try:
            with settings():
                run_worker(coordinator, compute, worker)
        except BaseException as error:  # the caller of run gets it
            steps = coordinator.run.state.clock.steps
            at = f" at its step {steps[worker]}" if worker in steps else ""
            error.add_note(f"This happened in worker {worker} of {who}{at}.")
            errors.append(error)
            coordinator.stop("failed")
        finally:
            coordinator.done(worker)

    workers = sorted(coordinator.working)
    threads = [threading.Thread(target=work, args=(worker,), name=f"shardopt-worker-{worker}") for worker in workers]
    if coordinator.over():
        return
    try:
        for thread in threads:
            thread.start()
        watch(coordinator)
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C reaches the main thread only
        coordinator.stop("failed")
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[0]
