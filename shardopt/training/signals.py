"""How a run is ended before its time: SIGTERM and SIGINT as requests to finish the step, and one verdict of all processes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

VERDICTS = ("exhausted", "early", "interrupted", "sigterm")
"""How a run can end before its time; where verdicts differ, the later in this list wins."""

SIGNALS = ("interrupted", "sigterm")
"""Verdicts of a signal."""

_VERDICTS = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupted"}


def common_verdict(*verdicts: str | None, due: bool) -> str | None:
    """Return the weightiest verdict of all processes, or None if none has one.

    With several processes each call where `due` is true gathers one integer per process, which waits for the steps under
    way; where it is false the answer is None, and a process with a verdict brings it again next time.

    Args:
      *verdicts: what this process wants: names from `VERDICTS`, or None.
      due: whether to ask at this step; the same on all processes.
    """
    code = max((VERDICTS.index(verdict) for verdict in verdicts if verdict is not None), default=-1)
    if jax.process_count() > 1:
        if not due:
            return None
        code = int(np.max(multihost_utils.process_allgather(np.int32(code))))
    return None if code < 0 else VERDICTS[code]


@contextmanager
def catch_signals() -> Iterator[Callable[[], str | None]]:
    """Note SIGTERM and SIGINT while the context lasts; a second SIGINT raises KeyboardInterrupt.

    Python runs handlers in the main thread only, so in another thread nothing is caught. A signal that the process
    ignores (SIGINT under nohup) stays ignored. The previous handlers are back when the context ends.

    Yields:
      A function that returns "sigterm" or "interrupted", whichever came first, or None.
    """
    received: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and "interrupted" in received:
            raise KeyboardInterrupt
        received.append(_VERDICTS[signal.Signals(number)])

    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _VERDICTS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, note)
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
