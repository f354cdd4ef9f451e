"""Several processes come to one verdict: none goes on alone and waits for the others."""

import json
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from shardopt.core.errors import CheckpointError
from shardopt.runtime.progress import waiting

T = TypeVar("T", bound=bool | int | str | list | None)


def on_primary_process(action: Callable[[], T]) -> T:
    """Run the action on process 0 alone; every process returns its value, which is JSON, or raises what it raised."""
    if jax.process_count() == 1:
        return action()
    value = failure = None
    if jax.process_index() == 0:
        try:
            value = action()
        except Exception as error:
            failure = error
    value, received = json.loads(exchange(json.dumps([value, _describe(failure)]))[0])
    if failure is not None:
        raise failure
    if received is not None:
        raise _error(*received)
    return value


def raise_together(failure: BaseException | None, *, unless: type[CheckpointError] | None = None) -> None:
    """Raise this process's failure, or that of another process; all must call it.

    Args:
      failure: this process's, if it has one.
      unless: nothing is raised if the failure of any process is of this kind.
    """
    received = [json.loads(text) for text in exchange(json.dumps(_describe(failure)))]
    errors = [_error(*one) for one in received if one is not None]
    if unless is not None and any(isinstance(error, unless) for error in errors):
        return
    if failure is not None:
        raise failure
    if errors:
        raise errors[0]


def exchange(text: str) -> list[str]:
    """Return every process's text, in the order of the processes. All must call it, on their main thread."""
    if jax.process_count() == 1:
        return [text]
    mine = text.encode()
    with waiting("agree"):
        rows = _gather(len(mine).to_bytes(_SIZE, "little") + mine[:_ROOM], _SIZE + _ROOM)
        sizes = [int.from_bytes(row[:_SIZE], "little") for row in rows]
        found = [row[_SIZE:] for row in rows]
        if (more := max(sizes) - _ROOM) > 0:
            rests = _gather(mine[_ROOM:], -(-more // _ROOM) * _ROOM)
            found = [begin + rest for begin, rest in zip(found, rests, strict=True)]
    return [row[:size].decode() for row, size in zip(found, sizes, strict=True)]


_SIZE, _ROOM = 4, 1020
"""Bytes of a length, and of a text that goes with it: of one shape, so that most need one program and one collective."""


def _gather(mine: bytes, size: int) -> list[bytes]:
    """Return every process's bytes, padded to a size."""
    from jax.experimental import multihost_utils

    rows = multihost_utils.process_allgather(np.frombuffer(mine.ljust(size, b"\0"), np.uint8))
    return [row.tobytes() for row in rows]


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


def _describe(failure: BaseException | None) -> tuple[str, str] | None:
    return None if failure is None else (type(failure).__name__, str(failure))


def _error(kind: str, message: str) -> CheckpointError:
    """Return the error of another process, of the same kind where that is one of checkpoints."""
    kinds = {one.__name__: one for one in CheckpointError.__subclasses__()}
    return kinds.get(kind, CheckpointError)(message)
