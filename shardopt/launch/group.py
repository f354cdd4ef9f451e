"""The processes of one attempt: they begin together, and when one fails all end."""

import queue
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardopt.launch.first_failure import failures
from shardopt.launch.member import Member, end, environment_of, free_address, start, tell

_GRACE = 3.0
"""Seconds between the request to end and the kill. Who waits for a dead process in a collective cannot answer."""

_LULL = 0.5
"""Seconds in which a failure is looked for that was the cause of the first one seen."""


class Ended(NamedTuple):
    """How an attempt ended.

    Attributes:
      failed: the rank and exit code (negative for a signal) of the process that failed first; None if none did.
      killed: how many processes ended by a signal that we did not send.
      logs: the log of each process.
    """

    failed: tuple[int, int] | None
    killed: int
    logs: tuple[Path, ...]


def run_group(
    command: Sequence[str],
    count: int,
    log_of: Callable[[int], Path],
    stop: Callable[[], signal.Signals | None],
    keep: Sequence[int],
) -> Ended:
    """Run `count` processes until all have ended well, or one has failed and the others were ended.

    Args:
      command: what each runs.
      count: how many.
      log_of: the log file of a rank.
      stop: returns a signal once for each that is to be passed on to all, else None.
      keep: descriptors that they inherit.

    Raises:
      OSError: if the command cannot be started, or a log cannot be written.
    """
    address, finished, members = free_address(), queue.SimpleQueue(), []
    with failures() as heard:
        try:
            for rank in range(count):
                place = environment_of(rank, count, address) | heard.environment
                kept = (*keep, heard.descriptor)
                members.append(start(command, rank, log_of(rank), place, shown=rank == 0, keep=kept))
                threading.Thread(target=_report, args=(members[-1], finished), daemon=True).start()
            seen = _wait(members, finished, stop)
            said = heard.ranks()
        finally:
            end(members, grace=0.0 if all(one.process.poll() == 0 for one in members) else _GRACE)
    codes = {rank: code for rank, code in seen if code}
    killed = sum(code < 0 for code in codes.values())
    return Ended(_first(codes, said), killed, tuple(member.log for member in members))


def _first(codes: dict[int, int], said: Sequence[int]) -> tuple[int, int] | None:
    """Return who failed first, given the exit codes in the order in which the failures were seen; the others miss it.

    Who was killed comes before all. Then, if whose end was seen first said that it fails, who said so first.
    """
    if not codes:
        return None
    seen = next(iter(codes))
    first = next((rank for rank, code in codes.items() if code < 0), None)
    if first is None:
        first = next((rank for rank in said if rank in codes), seen) if seen in said else seen
    return first, codes[first]


def _report(member: Member, finished: "queue.SimpleQueue[tuple[int, int]]") -> None:
    finished.put((member.rank, member.process.wait()))


def _wait(
    members: Sequence[Member],
    finished: "queue.SimpleQueue[tuple[int, int]]",
    stop: Callable[[], signal.Signals | None],
) -> list[tuple[int, int]]:
    """Return (rank, exit code) in the order in which they ended, until all have, or shortly after a failure."""
    seen: list[tuple[int, int]] = []
    failed = False
    while len(seen) < len(members):
        if (number := stop()) is not None:
            for member in members:
                tell(member, number)
        try:
            seen.append(finished.get(timeout=_LULL if failed else 0.1))
        except queue.Empty:
            if failed:
                break
            continue
        failed = failed or bool(seen[-1][1])
    return seen
