"""Agreement between processes: all succeed or all raise, so none goes on alone and waits for the
others.
"""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import jax

from shardopt.core import CheckpointError, format_error
from shardopt.runtime._agreement import agree

T = TypeVar("T", bound=bool | int | str | list | None)


def on_primary_process(action: Callable[[], T]) -> T:
    """Run the action on process 0 only; every process returns its value or raises its error.

    Args:
      action: returns a JSON value.
    """
    if jax.process_count() == 1:
        return action()
    value = failure = None
    if jax.process_index() == 0:
        try:
            value = action()
        except Exception as error:
            failure = error
    # Also after a failure, since the others wait here for the answer.
    value, received = json.loads(exchange(json.dumps([value, _describe(failure)]))[0])
    if failure is not None:
        raise failure
    if received is not None:
        raise _error(*received)
    return value


def raise_together(failure: BaseException | None) -> None:
    """Raise this process's failure, or the failure of another process. All processes must call it.

    Args:
      failure: the failure of this process, or None.
    """
    received = [json.loads(text) for text in exchange(json.dumps(_describe(failure)))]
    if failure is not None:
        raise failure
    for description in received:
        if description is not None:
            raise _error(*description)


def check_all_write(directory: Path) -> None:
    """Refuse a folder that some processes do not see, or cannot write to. All must call it.

    Raises:
      CheckpointError: names such a process and its host.
    """
    if jax.process_count() == 1:
        return
    shared = directory / ".seen-by-all"
    on_primary_process(lambda: shared.mkdir(exist_ok=True))
    failure = None
    try:
        (shared / str(jax.process_index())).write_bytes(b"\0")
    except OSError as error:
        problem = (
            f"process {jax.process_index()} on {socket.gethostname()} cannot write to {directory}"
            f" ({type(error).__name__}: {error})."
        )
        fix = "save to a folder that all hosts see and can write to."
        failure = CheckpointError(format_error("Checkpoints", problem, fix=fix))
    try:
        raise_together(failure)
    finally:
        on_primary_process(lambda: shutil.rmtree(shared))


def exchange(text: str) -> list[str]:
    """Return the text of every process, in the order of the processes.

    All must call it on their main thread, or all within `exchange_through`.
    """
    if jax.process_count() == 1:
        return [text]
    through = _through.get()
    if through is not None:
        return through(text)
    return agree("shardopt", text, range(jax.process_count()))


_through: ContextVar[Callable[[str], list[str]] | None] = ContextVar("through", default=None)


@contextmanager
def exchange_through(function: Callable[[str], list[str]]) -> Iterator[None]:
    """Let `exchange` use a function on this thread while the context lasts.

    The main threads may exchange other texts meanwhile.
    """
    token = _through.set(function)
    try:
        yield
    finally:
        _through.reset(token)


def assigned_names(sizes: dict[str, int]) -> list[str]:
    """Return the names that this process handles, so that all processes get about the same number
    of bytes.

    Args:
      sizes: bytes by name, the same on all processes.
    """
    loads = [0] * jax.process_count()
    assigned = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name] + 1  # the 1 distributes empty files too
        if rank == jax.process_index():
            assigned.append(name)
    return assigned


def _describe(failure: BaseException | None) -> tuple[str, str] | None:
    return None if failure is None else (type(failure).__name__, str(failure))


def _error(type_name: str, message: str) -> CheckpointError:
    """Return the error of another process, as the same type if it is a CheckpointError."""
    error_types = {
        error_type.__name__: error_type for error_type in CheckpointError.__subclasses__()
    }
    return error_types.get(type_name, CheckpointError)(message)
