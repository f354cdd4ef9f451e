"""How many processes a job can have now: the answer of a user's script, asked repeatedly while too
few train.
"""

import subprocess
import threading
from collections.abc import Callable

_ASK_SECONDS = 5.0
"""Seconds between two calls of the script."""
_SCRIPT_SECONDS = 30.0
"""Seconds after which a call of the script is given up."""


class Discovery:
    """Asks a shell command how many processes can run, on a thread while `active`, until `close`.

    Args:
      script: the shell command.
      say: prints a message.

    Attributes:
      active: whether to ask.
      stable_count: the smaller of the last two answers since `active` was set; 0 before. A host
        that comes and goes again does not count.
    """

    def __init__(self, script: str, *, say: Callable[[str], None]):
        self._script, self._say, self._last_reason = script, say, ""
        self.active, self.stable_count = False, 0
        self._closed = threading.Event()
        threading.Thread(target=self._ask_repeatedly, daemon=True).start()

    def ask(self) -> int | None:
        """Return how many processes can run now.

        None, with a message, if the script gives no number.
        """
        try:
            result = subprocess.run(
                self._script,
                shell=True,
                timeout=_SCRIPT_SECONDS,
                check=False,
                text=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return self._report(f"{type(error).__name__}: {error}")
        output = result.stdout.strip()
        if result.returncode == 0 and output.isdecimal():
            self._last_reason = ""
            return int(output)
        return self._report(
            f"exit code {result.returncode}, it printed"
            f" {(output or result.stderr.strip())[-200:]!r}"
        )

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _report(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            self._say(
                f"launch: --discovery-script does not say how many processes can run: {reason}."
            )

    def _ask_repeatedly(self) -> None:
        previous_count = 0
        while not self._closed.wait(_ASK_SECONDS):
            count = (self.ask() or 0) if self.active else 0
            # `active` may have ended while the script ran
            self.stable_count = min(previous_count, count) if self.active else 0
            previous_count = count
