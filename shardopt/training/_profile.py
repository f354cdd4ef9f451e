"""Profiles of a run: `fit(profile=(first, count))`, or a signal to a process of a running job."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from shardopt.core import check_count, type_error
from shardopt.runtime._processes import handled_signals
from shardopt.step._optimizer import Metrics
from shardopt.training._hooks import Hook

SIGNALLED_STEPS = 5
"""The number of steps in a profile that a signal asks for."""

STEP = "train"
"""The name of the annotation of each step, which xprof groups operations by."""


class Profiler(Hook):
    """Records profiles of some steps, with an annotation for each step.

    Every process records its own devices.

    Args:
      directory: the folder of the profiles.
      steps: the first step, counted from 0, and the number of steps; None if only a signal starts a
        profile.
      say: prints a message.
    """

    def __init__(self, directory: Path, steps: tuple[int, int] | None, say: Callable[[str], None]):
        self._directory = directory
        self._steps = steps
        self._say = say
        self._signalled = False
        self._end: int | None = None
        self._annotation = contextlib.ExitStack()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Take SIGUSR1 as a request, in the main thread.

        At the end, stop a profile that is in progress.
        """
        with handled_signals([signal.SIGUSR1], self._request):
            try:
                yield
            finally:
                self._stop()

    def before_step(self, step: int, position: int) -> None:
        """Start a profile if one is due, and annotate the step."""
        count = self._steps[1] if self._steps is not None and self._steps[0] == step else None
        if self._signalled and self._end is None:
            self._signalled = False
            count = SIGNALLED_STEPS
        if count is not None and self._end is None:
            jax.profiler.start_trace(str(self._directory))
            self._end = step + count
        if self._end is not None:
            annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
            self._annotation.enter_context(annotation)

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Wait for the last step of a profile, and write the profile."""
        if self._end is None:
            return
        self._annotation.close()
        if step + 1 >= self._end:
            jax.block_until_ready(metrics)
            self._stop()

    def _request(self, *_: object) -> None:
        self._signalled = True

    def _stop(self) -> None:
        self._annotation.close()
        if self._end is not None:
            self._end = None
            jax.profiler.stop_trace()
            self._say(
                f"A profile is in {self._directory}: open it with xprof, or its trace.json.gz with"
                " ui.perfetto.dev."
            )


def check_profile(profile: tuple[int, int] | None) -> None:
    """Check the argument of `fit`.

    Raises:
      TypeError: if it is no pair of integers.
      ValueError: if a number is out of range.
    """
    if profile is None:
        return
    if not isinstance(profile, tuple | list) or len(profile) != 2:
        problem = f"profile must be (first step, number of steps), got {profile!r:.80}."
        raise type_error(problem, fix="pass profile=(10, 5).")
    check_count("profile[0]", profile[0], minimum=0)
    check_count("profile[1]", profile[1])
