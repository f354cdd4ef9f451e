"""A turn: what a run holds while it works on its state, and gives away while it is in other code.

Other code is the code of the user (a loader, an evaluation, a logger), tracing and the compiler. It
takes any time, and the state is not touched meanwhile. So another thread that gets the turn may save
the state.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn


class StopRun(BaseException):
    """Ends the loop of a run that a signal stops."""


class Turn:
    """The turn of a run, which belongs to the thread that makes it until that gives it away.

    Attributes:
      lock: held by the thread that has the turn.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self._owner = threading.get_ident()
        self._is_away = False
        self._may_leave = False

    @contextmanager
    def away(self, *, may_leave: bool = False) -> Iterator[None]:
        """Give the turn away while the context lasts; nothing on other threads, or if it is away.

        Args:
          may_leave: whether `leave` may end the context.
        """
        if self._is_away or threading.get_ident() != self._owner:
            yield
            return
        self._is_away = True
        self.lock.release()
        try:
            self._may_leave = may_leave
            yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Take the turn back, before the end of the context: the state is about to be replaced."""
        # A handler of a signal may call `leave` up to the second line; then nothing is left to do.
        if self._is_away and threading.get_ident() == self._owner:
            self._may_leave = False
            self.lock.acquire()
            self._is_away = False

    def leave(self) -> None:
        """Leave the code of the user by a `StopRun`, if the context allows it.

        A handler of a signal calls it, on the thread of the run.
        """
        if self._may_leave:
            self._may_leave = False
            self._take_and_stop()

    def _take_and_stop(self) -> NoReturn:
        self.lock.acquire()
        self._is_away = False
        raise StopRun

    def close(self) -> None:
        """Give the turn away for good."""
        if not self._is_away:
            self._is_away = True
            self.lock.release()


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)
"""The turn of the run that this thread is in."""


@contextmanager
def current_turn(turn: Turn) -> Iterator[None]:
    """Let `take_back_turn` find a turn while the context lasts."""
    token = _current.set(turn)
    try:
        yield
    finally:
        _current.reset(token)


def take_back_turn() -> None:
    """Take back the turn of the run that this thread is in, if there is one.

    A step calls it when it is compiled, before its program takes over the memory of the state.
    """
    turn = _current.get()
    if turn is not None:
        turn.take_back()
