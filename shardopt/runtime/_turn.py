"""A turn: a run holds it while it works on its state, and gives it away while it is in other code.

Other code is the code of the user (a loader, an evaluation, a logger), tracing and the compiler. It
takes any time, and the state is not touched meanwhile. So another thread that gets the turn may save
the state.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


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

    def away(self) -> "_Away":
        """Give the turn away while the context lasts; nothing on other threads, or if it is away."""
        return _Away(self)

    def give(self) -> bool:
        """Give the turn away, if this thread has it; return whether it had."""
        if self._is_away or threading.get_ident() != self._owner:
            return False
        self._is_away = True
        self.lock.release()
        return True

    @contextmanager
    def leavable(self) -> Iterator[None]:
        """Let `leave` end the context, if the turn is away."""
        self._may_leave = self._is_away and threading.get_ident() == self._owner
        try:
            yield
        finally:
            self._may_leave = False

    def take_back(self) -> None:
        """Take the turn back, before the end of the context: the state is about to be replaced."""
        if self._is_away and threading.get_ident() == self._owner:
            self._may_leave = False  # a handler that calls `leave` would wait for this thread
            self.lock.acquire()
            self._is_away = False

    def leave(self) -> None:
        """Leave the code of the user by a `StopRun`, if it is in `leavable`; take the turn back.

        A handler of a signal calls it, on the thread of the run.
        """
        if self._may_leave:
            self._may_leave = False
            self.lock.acquire()
            self._is_away = False
            raise StopRun

    def close(self) -> None:
        """Give the turn away for good."""
        if not self._is_away:
            self._is_away = True
            self.lock.release()


class _Away:
    """The context of `Turn.away`; a class, because a loop enters it several times a step."""

    def __init__(self, turn: Turn):
        self._turn = turn

    def __enter__(self) -> None:
        self._is_given = self._turn.give()

    def __exit__(self, *_: object) -> None:
        if self._is_given:
            self._turn.take_back()


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)
"""The turn of the run whose step this thread takes."""


@contextmanager
def turn_of_step(turn: Turn) -> Iterator[None]:
    """Give the turn away while the context lasts, or until a step calls `take_back_turn`."""
    token = _current.set(turn)
    try:
        with turn.away():
            yield
    finally:
        _current.reset(token)


def take_back_turn() -> None:
    """Take back the turn of the run whose step this thread takes, if there is one.

    The step calls it when it is compiled, before its program takes over the memory of the state.
    """
    turn = _current.get()
    if turn is not None:
        turn.take_back()


_stop_check: ContextVar[Callable[[], None] | None] = ContextVar("stop_check", default=None)
"""What ends the evaluation that this thread runs, if a signal stops the run."""


@contextmanager
def stop_points(check: Callable[[], None]) -> Iterator[None]:
    """Let `pass_stop_point` call `check` while the context lasts."""
    token = _stop_check.set(check)
    try:
        yield
    finally:
        _stop_check.reset(token)


def pass_stop_point() -> None:
    """End the evaluation of a run that a signal stops, by a `StopRun`.

    `opt.evaluate` and `so.training.evaluation` call it before each batch, which all processes
    evaluate together. So all of them leave before the same batch.
    """
    check = _stop_check.get()
    if check is not None:
        check()
