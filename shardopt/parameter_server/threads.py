"""Workers as threads of this process, one a worker, each with devices of its own."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax

from shardopt.parameter_server.coordinator import Coordinator
from shardopt.parameter_server.worker import Compute, run_worker

# The settings of jax that hold for one thread only, carried into another.


_NAMES = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
}


def settings_here() -> Callable[[], AbstractContextManager[object]]:
    """Return what sets up another thread as this one is now: `with settings(): ...`.

    A context such as `jax.enable_x64(True)` holds for the thread that entered it; workers would compute in another
    precision than their caller.
    """
    values = settings_values()

    def enter() -> ExitStack:
        stack = ExitStack()
        for name, value in values.items():
            stack.enter_context(_NAMES[name](value))
        return stack

    return enter


def settings_values() -> dict[str, Any]:
    """Return the settings as they are here."""
    return {name: getattr(jax.config, name) for name in _NAMES}


def use_settings(values: dict[str, Any]) -> None:
    """Make settings those of this process."""
    for name, value in values.items():
        jax.config.update(name, value)


def run_threads(who: str, coordinator: Coordinator, compute: Compute, callbacks: Any) -> None:
    """Drive a run until all is over. Whatever ends it, every thread has ended when this returns.

    Args:
      who: the function that the user called, for messages.
      coordinator: the server.
      compute: what the workers do.
      callbacks: `callbacks(coordinator)`, which takes milestones away for as long as somebody works, on the caller's thread.

    Raises:
      BaseException: what a worker raised, with its traceback and a note saying which worker it was.
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
        callbacks(coordinator)
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
