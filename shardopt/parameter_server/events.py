"""What happens on a server, as a value: the entries of its log."""

from typing import NamedTuple

KINDS = ("join", "pull", "push", "refuse", "leave", "resume")


class Event(NamedTuple):
    """One entry of the log.

    Attributes:
      kind: "join", "pull", "push", "leave"; "refuse" for a push that was not used because it was not finite; "resume"
        for a worker that goes on after the server was restored from a checkpoint, its step under way given up.
      worker: who.
      clock: the step in question: the one begun by a pull, finished by a push; else the worker's next one.
      version: updates that had been applied to the parameters once this had happened.
      pulled: for a push, the version that it was computed from; otherwise `version`.
      staleness: by how many *clocks* the worker was ahead of the slowest when it began this step: 0 to max_staleness.
      time: seconds since the run began, measured or virtual. Of no influence on the mathematics.
      waited: for a pull (or leave), for how many of the seconds before it the worker was ready and the bound held it back.
    """

    kind: str
    worker: int
    clock: int
    version: int
    pulled: int
    staleness: int = 0
    time: float = 0.0
    waited: float = 0.0

    def without_times(self) -> "Event":
        """Return the event as the server itself makes it: it knows no times."""
        return self._replace(time=0.0, waited=0.0)

    @property
    def delay(self) -> int:
        """Versions that passed between the pull and the push, not counting the one that the push made.

        With a bound of s clocks and n workers that stay, at most (n - 1)(2s + 1): each of the others may be s
        steps behind at the pull and s + 1 ahead at the push. 0 with max_staleness=0, where the updates of a clock
        are applied as one.
        """
        return max(0, self.version - self.pulled - (self.kind == "push"))
