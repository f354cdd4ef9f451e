"""Run a command that dies together with the process that started it: `python follow.py PID
COMMAND...`.

It is a separate file, run by its path, so that the command starts without importing shardopt.
"""

import os
import signal
import sys

_SET_PDEATHSIG = 1  # prctl(2); the setting survives exec


def follow(launcher: int, command: list[str]) -> None:
    """Replace this process by the command.

    On Linux the kernel kills it when the thread that started it ends.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher died before prctl
            sys.exit("launch: the launcher of this process has died.")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these signals, and exec keeps ignored signals ignored
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(
            f"launch: {command[0]!r} cannot be started ({type(error).__name__}: {error.strerror})."
        )


if __name__ == "__main__":
    follow(int(sys.argv[1]), sys.argv[2:])
