"""Becomes a command that dies when the process that started it does: `python follow.py PID COMMAND...`.

A file of its own, run by its path: the command is not to wait until shardopt is imported.
"""

import os
import signal
import sys

_SET_PDEATHSIG = 1  # prctl(2); it outlives exec


def follow(launcher: int, command: list[str]) -> None:
    """Become the command. The kernel kills it when the thread of the launcher ends that started it; on Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before that
            sys.exit("launch: the launcher of this process has died.")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"launch: {command[0]!r} cannot be started ({type(error).__name__}: {error.strerror}).")


if __name__ == "__main__":
    follow(int(sys.argv[1]), sys.argv[2:])
