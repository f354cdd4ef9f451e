"""Messages of what several commands share, under the name of the command that was typed."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def named(command: str) -> Iterator[None]:
    """Let a refusal that was written for `train` speak of another command.

    Example:
      >>> with named("plan"):
      ...     raise ValueError("train: --optimizer 3 cannot be read.")
      Traceback (most recent call last):
      ...
      ValueError: plan: --optimizer 3 cannot be read.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("train: ", f"{command}: ", 1)) from None
