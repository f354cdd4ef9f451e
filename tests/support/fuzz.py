"""Inputs of all kinds for functions that read them. The outcome is a result, or an error that was
written for people.
"""

import signal
import warnings
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings

from shardopt.core._errors import CheckpointError

LONGEST = 20
"""Seconds after which an input counts as one that hangs."""

COUNTS = [100, pytest.param(10_000, marks=pytest.mark.slow)]
"""Inputs in a normal run, the same ones each time, and in one that looks for new ones."""


def fuzz(prop, *strategies, count):
    """Call `prop` with `count` draws of the strategies."""
    run = given(*strategies)(prop)
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    settings(
        max_examples=count,
        deadline=None,
        derandomize=count <= 1000,
        database=None,
        suppress_health_check=quiet,
    )(run)()


def outcome(action, *starts):
    """Return (result of the action, None), or (None, message) of a documented error.

    Fail for any other and for hangs.

    A documented error is a ValueError or TypeError, none of its subclasses but CheckpointError and
    its own, that names the function it comes from."""
    try:
        with _in_time():
            return action(), None
    except (ValueError, TypeError) as error:
        caught = error
    assert type(caught) in (ValueError, TypeError) or isinstance(caught, CheckpointError), repr(
        caught
    )
    assert str(caught).startswith(tuple(f"{start}: " for start in starts)), repr(caught)
    return None, str(caught)


@contextmanager
def _in_time():
    def hang(*_):
        raise AssertionError(f"it hangs: no answer after {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LONGEST)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of `re`, about patterns
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
