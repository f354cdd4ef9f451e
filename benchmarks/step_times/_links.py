"""Transfers that share links: those over one mesh axis, or one way between a chip and its host, get equal
parts of its bandwidth.
"""

import dataclasses
import math
from collections import Counter
from typing import NamedTuple

HOST_BANDWIDTHS = {"v4": 16e9, "v5e": 16e9, "v5p": 16e9, "v6e": 32e9}
"""Generation -> bytes per second from a chip to its host, and as many back.

"How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) has 16 GB/s each way for v4, "typically
around 1.5e10" for a chip, and 32 GB/s for v6e, "about 2x higher than v5". It has none for tpu7x.
"""


class Transfer(NamedTuple):
    """A transfer over the mesh axes `axes`, from `start` to `end`."""

    axes: tuple[str, ...]
    start: float
    end: float


@dataclasses.dataclass
class Links:
    """The transfers of a program, in the order in which they begin.

    A transfer over an axis that n transfers use runs at 1/n of its speed. Over several axes the
    busiest one counts. So a short transfer that begins beside a long one ends soon, and the long one
    loses the time that the short one takes.

    Attributes:
      now: the time up to which transfers have been sent.
      left: number of a transfer -> seconds that the rest of it takes alone.
      begun: number of a transfer -> its axes and its start.
      ended: the transfers that have ended, by number.
    """

    now: float = 0.0
    left: dict[int, float] = dataclasses.field(default_factory=dict)
    begun: dict[int, tuple[tuple[str, ...], float]] = dataclasses.field(default_factory=dict)
    ended: dict[int, Transfer] = dataclasses.field(default_factory=dict)

    def send(self, axes: tuple[str, ...], seconds: float, time: float) -> int:
        """Begin a transfer at a time that is not before `now`. Return its number."""
        self._advance(time)
        number = len(self.begun)
        self.begun[number] = axes, time
        self.left[number] = seconds
        return number

    def end_of(self, number: int, time: float) -> float:
        """Return when a transfer ends, if none begins after `time`; at the earliest `time`."""
        self._advance(time)
        while number in self.left:
            self._advance(self._next_end())
        return max(self.ended[number].end, time)

    def _slowness(self) -> dict[int, int]:
        """Return how many times longer than alone each transfer takes now."""
        users = Counter(axis for number in self.left for axis in self.begun[number][0])
        return {
            number: max((users[axis] for axis in self.begun[number][0]), default=1)
            for number in self.left
        }

    def _next_end(self) -> float:
        slowness = self._slowness()
        return self.now + min(
            (seconds * slowness[number] for number, seconds in self.left.items()), default=math.inf
        )

    def _advance(self, time: float) -> None:
        """Send until a time, and let transfers end on the way."""
        while self.left and self.now < time:
            slowness = self._slowness()
            end = min(time, self._next_end())
            for number, factor in slowness.items():
                # what is left after rounding is nothing
                if self.now + self.left[number] * factor <= end:
                    del self.left[number]
                    axes, start = self.begun[number]
                    self.ended[number] = Transfer(axes, start, end)
                else:
                    self.left[number] -= (end - self.now) / factor
            self.now = end
        self.now = max(self.now, time)
