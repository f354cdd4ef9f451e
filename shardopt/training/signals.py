"""SIGTERM and SIGINT as requests to finish the step, instead of sudden ends."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

# One verdict for all processes, so that they stop at the same step.


VERDICTS = ("exhausted", "early", "interrupted", "sigterm")
"""How a run can end before its time; where verdicts differ, the later in this list wins."""


def common_verdict(*verdicts: str | None, due: bool) -> str | None:
    """Return the weightiest verdict of all processes, or None if none has one.

    With one process there is nobody to ask. With several, each call where `due` is true gathers one integer a
    process, which waits for the steps under way; where it is false the answer is None, and who has a verdict
    brings it again next time.

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


_VERDICTS = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupted"}

SIGNALS = tuple(_VERDICTS.values())
"""How a run ends that a signal has ended."""


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
