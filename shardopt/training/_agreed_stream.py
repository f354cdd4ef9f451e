"""The batches of `fit` on several processes: all have a next batch, or none takes a step."""

import dataclasses
from collections.abc import Callable

from shardopt.core import PyTree
from shardopt.runtime._turn import StopRun
from shardopt.step._global_rows import END
from shardopt.step._rows import AgreedRows, ended_text
from shardopt.training._resume import strongest
from shardopt.training._stream import BatchStream


@dataclasses.dataclass(frozen=True)
class AgreedStream:
    """Draws global batches, and agrees with the other processes whether to stop.

    Attributes:
      stream: the batches of this process.
      rows: joins the batches of the processes.
      say: prints a message.
    """

    stream: BatchStream
    rows: AgreedRows
    say: Callable[[str], None]

    def draw(self, received_signal: Callable[[], str | None]) -> tuple[PyTree, str | None]:
        """Return the next global batch, or `END`, and why the run ends, or None.

        If a process received a signal, all take the step of the batch that they have, and stop
        after it. If a process has no batch, none takes a step.

        Args:
          received_signal: returns the signal that asks this process to stop, or None.

        Raises:
          ValueError: if the batches of the processes do not fit together.
          RuntimeError: if the loader of another process fails.
        """
        batch, error = self.rows.draw(self._draw_or_end)
        # One message for rows, signals and errors, so that a step costs one exchange.
        messages = self.rows.exchange(batch, note=received_signal(), error=error)
        stopped = strongest([message.note for message in messages])
        if all(message.claim != "end" for message in messages):
            return self.rows.placed(batch, messages), stopped
        if batch is not None:
            self.stream.leave_last()
        if stopped is None and (
            text := ended_text(self.rows.processes, messages, self.stream.drawn)
        ):
            self.say(text)
        return END, stopped or "exhausted"

    def _draw_or_end(self) -> PyTree:
        """Return the next batch of this process; `END` also if a signal ends the wait for it."""
        try:
            return self.stream.draw()
        except StopRun:
            return END
