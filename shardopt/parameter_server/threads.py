"""Workers as threads of this process, each with devices of its own."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import jax

from shardopt.parameter_server.callbacks import Callbacks
from shardopt.parameter_server.coordinator import Coordinator
from shardopt.parameter_server.run import AsyncResult, Compute, Job, Run, RunSpec, snapshot
from shardopt.parameter_server.server import Server
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


_THREAD_SETTINGS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
}
"""The settings of jax that hold for one thread only."""


def settings_here() -> Callable[[], AbstractContextManager[object]]:
    """Return what sets up another thread as this one is now: `with settings(): ...`.

    A context such as `jax.enable_x64(True)` holds for the thread that entered it; workers would compute in another
    precision than their caller.
    """
    values = settings_values()

    def enter() -> ExitStack:
        stack = ExitStack()
        for name, value in values.items():
            stack.enter_context(_THREAD_SETTINGS[name](value))
        return stack

    return enter


def settings_values() -> dict[str, object]:
    """Return the settings as they are here."""
    return {name: getattr(jax.config, name) for name in _THREAD_SETTINGS}


def use_settings(values: dict[str, object]) -> None:
    """Make settings those of this process."""
    for name, value in values.items():
        jax.config.update(name, value)
