"""How a run stops at a signal: the last finished step is saved at once, wherever the run is.

The run stops by itself where it looks at `Stop.verdict`, after each step. If it does not get there
soon, it is in code of the user, or in the compiler, and has given its `Turn` away. Then a thread
takes the turn, saves the state of the last step, and ends the loop of the run.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shardopt.runtime._processes import handled_signals, signal_bytes
from shardopt.runtime._turn import StopRun, Turn, current_turn

_LOG = logging.getLogger(__name__)

_VERDICTS = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupted"}

EXIT_CODES = {name: 128 + number for number, name in _VERDICTS.items()}
"""The exit code after each verdict, as a shell reports a process that the signal killed."""

PATIENCE = 0.25
"""Seconds in which a run may stop by itself, at the end of its step."""


class Stop:
    """The signals that a run got, and what happens then; see `watched`.

    Attributes:
      verdict: "sigterm" or "interrupted", by the signal that came first; None without one.
      turn: what the run gives away while it is in code of the user or in the compiler.
      save: saves the state of the last step. The run sets it when it has a state.
      must_leave: whether the loop of the run has to end.
    """

    def __init__(self) -> None:
        self.verdict: str | None = None
        self.turn = Turn()
        self.save: Callable[[], None] | None = None
        self.must_leave = False
        self._received: list[int] = []
        self._num_interrupts, self._is_woken = 0, False
        self._is_closed = threading.Event()
        self._main = threading.get_ident()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while the context lasts; a second SIGINT is a KeyboardInterrupt.

        Python gets signals in the main thread only, so a run in another thread gets none. A signal
        that the process ignores (SIGINT under nohup) stays ignored. At the end the handlers that
        stood before are back. A handler of the user is called then, if its signal came meanwhile.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in _VERDICTS}
        numbers = [number for number in _VERDICTS if handlers[number] is not signal.SIG_IGN]
        with handled_signals(numbers, self._record), current_turn(self.turn):
            thread = None
            try:
                with signal_bytes() as next_signal:
                    arguments = next_signal, numbers
                    thread = threading.Thread(target=self._watch, args=arguments, name="stop")
                    thread.start()
                    yield
            finally:
                self._is_closed.set()
                self.turn.close()
                if thread is not None:
                    thread.join()
        for number in dict.fromkeys(self._received):
            handler = handlers[signal.Signals(number)]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)

    def forget_run(self) -> None:
        """Save no more: the run has ended."""
        # the method of the run would make a cycle, and the memory of the state would wait for the
        # garbage collector
        self.save = None

    def check(self) -> None:
        """End the loop of the run if the last step was saved by the thread."""
        if self.must_leave:
            raise StopRun

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, on the main thread."""
        self._num_interrupts += number == signal.SIGINT
        if self._is_woken:  # this signal comes from the thread
            self._is_woken = False
            self.turn.leave()
            return
        self._note(number)
        if self._num_interrupts > 1:
            raise KeyboardInterrupt
        if self.must_leave:
            self.turn.leave()

    def _note(self, number: int) -> None:
        self._received.append(number)
        if self.verdict is None:
            self.verdict = _VERDICTS[signal.Signals(number)]

    def _watch(self, next_signal: Callable[[], int], numbers: list[signal.Signals]) -> None:
        """Wait for the first signal and for the turn; save, and end the loop of the run."""
        while number := next_signal():
            if number in numbers and not self.must_leave:
                self._note(number)
                self._stop(number)

    def _stop(self, number: int) -> None:
        if self._is_closed.wait(PATIENCE):
            return
        with self.turn.lock:
            if self._is_closed.is_set() or self.save is None:
                return
            try:
                self.save()
            except Exception as error:
                # The run ends, and saves the step itself; then it raises what it cannot do.
                _LOG.warning("fit: the thread that saves at a signal could not: %s", error)
            self.must_leave = True
        if not self._is_closed.is_set():
            # The main thread may wait in the code of the user. A signal wakes it.
            self._is_woken = True
            signal.pthread_kill(self._main, number)
