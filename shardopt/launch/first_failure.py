"""Who failed first: a process says so itself, before the others can miss it.

They miss it when the kernel closes its connections, which is before the kernel reports its end; on a busy machine one
of them can have failed and ended in between.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

_PIPE = "SHARDOPT_FAILURES"
"""The descriptor of the pipe, in the environment of each process."""


class Failures:
    """The launcher's end of a pipe that all processes inherit.

    Attributes:
      environment: what tells a process where to say that it fails.
      descriptor: what it inherits for that.
    """

    def __init__(self, reading: int, writing: int):
        self._reading, self.descriptor = reading, writing
        self.environment = {_PIPE: str(writing)}

    def ranks(self) -> list[int]:
        """Return who said that it fails, in that order."""
        said = b""
        with contextlib.suppress(BlockingIOError):  # nobody says any more
            while True:
                said += os.read(self._reading, 4096)
        return [int(line) for line in said.split()]


@contextlib.contextmanager
def failures() -> Iterator[Failures]:
    """Listen to the processes of one attempt."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        yield Failures(reading, writing)
    finally:
        os.close(reading)
        os.close(writing)


def say_failed() -> None:
    """Tell the launcher that this process fails, if there is one that listens."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ[_PIPE])
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # who closed it may have opened something else there
            os.write(descriptor, f"{int(os.environ['JAX_PROCESS_ID'])}\n".encode())
