"""Workers as threads of this process, one a worker, each with devices of its own."""

import threading
from typing import Any

from shardopt.parameter_server.compute import Compute
from shardopt.parameter_server.transports.hall import Hall
from shardopt.parameter_server.transports.life import live
from shardopt.parameter_server.transports.settings import settings_here


def run_threads(who: str, hall: Hall, compute: Compute, watch: Any) -> None:
    """Drive a run until all is over. Whatever ends it, every thread has ended when this returns.

    Args:
      who: the function that the user called, for messages.
      hall: the server.
      compute: what the workers do.
      watch: `watch(hall)`, which takes milestones away for as long as somebody works, on the caller's thread.

    Raises:
      BaseException: what a worker raised, with its traceback and a note saying which worker it was.
    """
    settings, errors = settings_here(), []

    def work(worker: int) -> None:
        try:
            with settings():
                live(hall, compute, worker)
        except BaseException as error:  # the caller of run gets it
            steps = hall.run.state.clock.steps
            at = f" at its step {steps[worker]}" if worker in steps else ""
            error.add_note(f"This happened in worker {worker} of {who}{at}.")
            errors.append(error)
            hall.stop("failed")
        finally:
            hall.done(worker)

    workers = sorted(hall.working)
    threads = [threading.Thread(target=work, args=(worker,), name=f"shardopt-worker-{worker}") for worker in workers]
    if hall.over():
        return
    try:
        for thread in threads:
            thread.start()
        watch(hall)
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C reaches the main thread only
        hall.stop("failed")
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[0]
