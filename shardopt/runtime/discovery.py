"""How many processes a job can have now: asked of a script of the user's, again and again, while fewer train."""

import subprocess
import threading
from collections.abc import Callable

_EVERY = 5.0
"""Seconds between two questions."""
_PATIENCE = 30.0
"""Seconds that the script may take."""


class Discovery:
    """Asks a shell command how many processes can run, on a thread while `active`, until `close`.

    Attributes:
      active: whether to ask.
      steady: what it said twice in a row since it is active; 0 until then. A host that comes and goes is not there.
    """

    def __init__(self, script: str, *, say: Callable[[str], None]):
        self._script, self._say, self._told = script, say, ""
        self.active, self.steady = False, 0
        self._over = threading.Event()
        threading.Thread(target=self._ask_again, daemon=True).start()

    def ask(self) -> int | None:
        """Return how many processes can run now; None where the script does not say, and then tell why, once."""
        try:
            found = subprocess.run(
                self._script,
                shell=True,
                timeout=_PATIENCE,
                check=False,
                text=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return self._tell(f"{type(error).__name__}: {error}")
        word = found.stdout.strip()
        if found.returncode == 0 and word.isdecimal():
            self._told = ""
            return int(word)
        return self._tell(f"exit code {found.returncode}, it printed {(word or found.stderr.strip())[-200:]!r}")

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _tell(self, why: str) -> None:
        if why != self._told:
            self._told = why
            self._say(f"launch: --discovery-script does not say how many processes can run: {why}.")

    def _ask_again(self) -> None:
        before = 0
        while not self._over.wait(_EVERY):
            now = (self.ask() or 0) if self.active else 0
            self.steady, before = min(before, now) if self.active else 0, now
