"""Several processes that must come to one verdict, so that none goes on alone and waits for ever."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardopt.core.errors import CheckpointError


def exchange(text: str) -> list[str]:
    """Return every process's text, in the order of the processes. All must call it, on their main thread."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([mine.size], np.int32)).ravel()
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: mine.size] = mine
    rows = multihost_utils.process_allgather(padded)
    return [rows[rank, :size].tobytes().decode() for rank, size in enumerate(sizes)]


def on_primary_process(action: Callable[[], Any]) -> Any:
    """Run the action on process 0 alone; every process returns its JSON value, or raises what it raised there."""
    if jax.process_count() == 1:
        return action()
    failure, told = None, {}
    if jax.process_index() == 0:
        try:
            told = {"value": action()}
        except Exception as error:
            failure, told = error, {"error": str(error)}
    told = json.loads(exchange(json.dumps(told))[0])
    if failure is not None:
        raise failure
    if "error" in told:
        raise CheckpointError(told["error"])
    return told["value"]


def raise_together(failure: BaseException | None, *, unless: Callable[[str], bool] = lambda text: False) -> None:
    """Raise this process's failure, or CheckpointError if another process has one; all must call it.

    Args:
      failure: this process's, if it has one.
      unless: given the message of each process; if it returns True for one of them nothing is raised.
    """
    told = exchange("" if failure is None else str(failure))
    if any(map(unless, told)):
        return
    if failure is not None:
        raise failure
    if other := next(filter(None, told), None):
        raise CheckpointError(other)


def share(sizes: dict[str, int]) -> list[str]:
    """Return the names that this process takes care of, so that all processes get about the same bytes."""
    loads = [0] * jax.process_count()
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name] + 1  # the 1 spreads empty files too
        if rank == jax.process_index():
            mine.append(name)
    return mine
