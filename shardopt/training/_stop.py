"""How a run stops at a signal: the last finished step is saved at once, wherever the run is.

The run stops by itself where it looks at `Stop.verdict`, after each step. If it does not get there
soon, it is in code of the user, or in the compiler, and has given its `Turn` away. Then a thread
takes the turn, saves the state of the last step, and ends the loop of the run.
"""

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import jax

from shardopt.checkpoint._multihost import exchange_through
from shardopt.runtime._processes import handled_signals, signal_bytes
from shardopt.runtime._turn import StopRun, Turn

if TYPE_CHECKING:
    from shardopt.runtime._peers import Peers

_LOG = logging.getLogger(__name__)

_VERDICTS = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupted"}

EXIT_CODES = {name: 128 + number for number, name in _VERDICTS.items()}
"""The exit code after each verdict, as a shell reports a process that the signal killed."""

_PAUSE_SECONDS = 0.2
"""Seconds that a main thread has between two rounds."""

PATIENCE = 0.25
"""Seconds in which a run may stop by itself, at the end of its step."""


class SavesAtSignal(Protocol):
    """A run whose state a thread saves."""

    step: int

    def save_at_signal(self) -> None:
        """Save the state of the last step."""


class Stop:
    """The signals that a run got, and what happens then; see `watched`.

    Attributes:
      verdict: "sigterm" or "interrupted", by the signal that came first; None without one.
      turn: the run gives it away while it is in code of the user or in the compiler.
      run: saves the state of the last step; None until it has a state.
      must_leave: whether the loop of the run has to end. On several processes it ends where they
        agree.
    """

    def __init__(self) -> None:
        self._peers = None
        if jax.process_count() > 1:
            from shardopt.runtime._peers import Peers  # only several processes load it

            self._peers = Peers()
        self._threads: list[threading.Thread] = []
        self.verdict: str | None = None
        self.turn = Turn()
        self.run: SavesAtSignal | None = None
        self.must_leave = False
        self._received: list[int] = []
        self._num_interrupts = 0
        self._is_woken = False
        self._num_batches = 0
        self._leave_at = None
        self._is_closed = threading.Event()
        self._main = threading.get_ident()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while the context lasts; a second SIGINT is a KeyboardInterrupt.

        Python gets signals in the main thread only, so a run in another thread gets none. A signal
        that the process ignores (SIGINT under nohup) stays ignored. At the end the handlers that
        stood before are back. A handler of the user is called then, if its signal came meanwhile.
        """
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in _VERDICTS}
            handlers = {n: handler for n, handler in before.items() if handler != signal.SIG_IGN}
        with handled_signals(handlers, self._record), ExitStack() as end:
            end.callback(self._end_threads)
            if handlers:
                next_signal = end.enter_context(signal_bytes())
                self._start_thread(self._watch, next_signal, handlers)
            if self._peers is not None:
                self._start_thread(self._listen, self._peers)
            yield
        for number in dict.fromkeys(self._received):
            handler = handlers[number]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, None)

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="stop")
        self._threads.append(thread)
        thread.start()

    def _end_threads(self) -> None:
        self._is_closed.set()
        self.turn.close()
        for thread in self._threads:
            thread.join()

    def forget_run(self) -> None:
        """Save no more: the run has ended."""
        # the method of the run would make a cycle, and the memory of the state would wait for the
        # garbage collector
        self.run = None

    def check(self) -> None:
        """End the loop of the run if the last step was saved by the thread."""
        if self.must_leave:
            raise StopRun

    def check_batch(self) -> None:
        """End an evaluation before a batch, which several processes do before the same one."""
        self.check()
        with self.turn.lock:  # no batch begins while the threads exchange the numbers
            self._num_batches += 1
        if self._leave_at is not None and self._num_batches >= self._leave_at:
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

    def _note(self, number: int) -> str:
        self._received.append(number)
        if self.verdict is None:
            self.verdict = _VERDICTS[signal.Signals(number)]
        return self.verdict

    def _watch(self, next_signal: Callable[[], int], numbers: Container[int]) -> None:
        """Wait for signals. After the first one save, or tell the other processes."""
        has_begun = False
        while number := next_signal():
            if number not in numbers or has_begun:
                continue
            has_begun = True
            verdict = self._note(number)
            if self._peers is None:
                self._stop()
            else:
                self._peers.tell(verdict)

    def _stop(self) -> None:
        """Wait for the turn; save, and end the loop of the run."""
        if self._is_closed.wait(PATIENCE):
            return
        # With the lock no step can begin, so the state stays as it is while it is saved.
        with self.turn.lock:
            if self._is_closed.is_set() or self.run is None:
                return
            self._save(self.run)
            self.must_leave = True
        self._wake()

    def _listen(self, peers: "Peers") -> None:
        """Wait until a process has got a signal; then save the same step as all others.

        The runs go on, and stop together where they agree before a step.
        """
        while (verdict := peers.verdict()) is None:
            if self._is_closed.wait(peers.poll_seconds):
                return
        self.verdict = self.verdict or verdict
        self._is_closed.wait(PATIENCE)
        for round_number in itertools.count():
            with self.turn.lock:
                if self._is_closed.is_set() or self.run is None:
                    return
                # Processes may be a step apart. Then the lock is given back, and the slower ones
                # may go on.
                if peers.all_are_at(self.run.step, round_number):
                    with exchange_through(peers.exchange):
                        self._save(self.run)
                    texts = peers.exchange(str(self._num_batches))
                    # One batch after the furthest process, so that all can leave their evaluation
                    # before the same one.
                    self._leave_at = max(map(int, texts)) + 1
                    break
            # the main thread may go on
            self._is_closed.wait(_PAUSE_SECONDS)
        self._wake()

    def _save(self, run: "SavesAtSignal") -> None:
        try:
            run.save_at_signal()
        except Exception as error:
            # The run ends, and saves the step itself. Then it raises the error of that save.
            _LOG.warning("fit: the thread that saves at a signal could not: %s", error)

    def _wake(self) -> None:
        """Leave the code of the user in the main thread, which may wait there, by a signal."""
        is_in_main = self._main == threading.main_thread().ident
        if is_in_main and not self._is_closed.is_set():
            self._is_woken = True
            # A blocking call of the main thread ends only by a signal to this thread.
            signal.pthread_kill(self._main, signal.SIGTERM)
