"""What a worker does from beginning to end, wherever it is: enter, pull, compute, push."""

from typing import Any

from shardopt.parameter_server.compute import Compute


def live(hall: Any, compute: Compute, worker: int, life: int = 0) -> None:
    """Live through every period of a worker's presence.

    Args:
      hall: a `Hall`, or what speaks for one in another process.
      compute: the worker's side.
      worker: its number.
      life: which of its lives this is.
    """
    while (position := hall.enter(worker, life)) is not None:
        compute.begin(worker, position)
        goes_on = True
        while goes_on:
            batch = compute.next_batch(worker)
            task = hall.pull(worker, life, batch is not None)
            if task is None:
                break
            update = compute.update(worker, task.params, batch, task.clock)
            goes_on = hall.push(worker, life, update, task.version)
