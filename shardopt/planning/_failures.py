"""Rates of failures and costs of recovery: the inputs of `plan_recovery` and of
`so.plan(failures=...)`.
"""

from dataclasses import dataclass

from shardopt.core._arguments import check_count, check_number
from shardopt.core._errors import calling, error_text


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often chips fail, and the cost of a failure. All times are in seconds.

    Attributes:
      mtbf: mean time between two failures of one chip, while it trains. A job of n chips that fails
        every h seconds of training has a `mtbf` of n h.
      restart: from the moment a failure is noticed until the job trains again: processes start,
        programs are compiled or loaded, the newest copy of the state is read. It contains restarts
        that fail themselves.
      save: training waits this long for one checkpoint. A write in the background is not part of
        it.
      detect: until a failure is noticed.
      replace: until a new host is there, if no spare waits. A spare that is used up is replaced
        after this time.
      host_chips: chips of one host, which is the size of a spare.
      snapshot: training waits this long for one snapshot in the memory of other hosts. None: there
        are no snapshots.
      wide: share of failures that no copy in memory survives, from 0 to 1. The whole job restarts
        from its checkpoint.
      islands: numbers of islands to try. Islands train on while one of them restarts; 1 is a
        synchronous job.
      exchange: time between two exchanges of islands. An island that restarts loses its work since
        the last exchange.
      stall: the other islands wait this long when one fails; 0 if they never wait for each other.

    Raises:
      TypeError: if an attribute is of the wrong kind.
      ValueError: if a number is out of range.

    Example:
      >>> failures = Failures(mtbf=50_000 * 3600, restart=300, save=5, snapshot=0.5)
      >>> failures.host_chips
      8
    """

    mtbf: float
    restart: float
    save: float
    detect: float = 0.0
    replace: float = 0.0
    host_chips: int = 8
    snapshot: float | None = None
    wide: float = 0.0
    islands: tuple[int, ...] = (1,)
    exchange: float = 0.0
    stall: float = 0.0

    def __post_init__(self) -> None:
        with calling("Failures"):
            for name in ("mtbf", "save"):
                check_number(name, getattr(self, name), positive=True)
            for name in ("restart", "detect", "replace", "wide", "exchange", "stall"):
                check_number(name, getattr(self, name))
            if self.snapshot is not None:
                check_number("snapshot", self.snapshot, positive=True)
            if self.wide > 1:
                raise ValueError(error_text(f"wide must be at most 1, got {self.wide}."))
            check_count("host_chips", self.host_chips)
            if not isinstance(self.islands, tuple) or not self.islands:
                problem = f"islands must be a tuple of integers, got {self.islands!r}."
                raise TypeError(error_text(problem, fix="pass for example islands=(1, 2, 4)."))
            for count in self.islands:
                check_count("islands", count)
