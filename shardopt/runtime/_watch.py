"""Find hangs: collect the reports of a job's processes, and find the process that lags behind.

`Watch` listens; `find_hang` is a function of the reports. A rank hangs if it has begun nothing new
for longer than the timeout *and no rank is behind it*. Ranks that wait for it in a collective are
ahead of it. A rank without reports is stopped, cut off, or in native code that holds the
interpreter lock. Messages are JSON, over connections whose peers have proved (HMAC, both ways) that
they know the run's token.

It is also a program, for `so.runtime.watchdog`: `_program.py _watch COUNT TIMEOUT PORT HOST`. This file
imports only the standard library.
"""

import contextlib
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from shardopt.runtime._messages import MessageServer
from shardopt.runtime._progress import ADDRESS, BEAT, HANG_TIMEOUT, MAIN, START, TOKEN, ProgressMark

FIRST_TIME_FACTOR = 10
"""A phase may take this many timeouts the first time, since it may compile; so may the start of a
process.
"""

_MESSAGE_BYTES = 2**19
_SHOWN_FRAMES = 8
"""Frames of a stack in the message; the file holds the complete stack."""
_ANSWER_SECONDS = 5.0
"""Seconds for which the program waits for stacks."""


class RankReport(NamedTuple):
    """The last report of a rank.

    Attributes:
      ago: seconds since the report arrived.
      lanes: the last mark of each lane; `began` is in seconds before the report was made.
      pid: the process on its host.
      host: the name of the host.
    """

    ago: float
    lanes: dict[str, ProgressMark]
    pid: int
    host: str


class Hang(NamedTuple):
    """A hang of a job.

    Attributes:
      ranks: the ranks that lag behind; all ranks if none lags.
      silent: whether no reports arrive from these ranks.
      lane: the lane where they lag.
      seconds: the duration so far.
    """

    ranks: tuple[int, ...]
    silent: bool
    lane: str
    seconds: float


def find_hang(
    reports: Mapping[int, RankReport | None], timeout: float, since_start: float
) -> Hang | None:
    """Return the hang of a job, or None.

    Args:
      reports: the last report by rank; None for a rank that never reported. Ranks that have ended
        are left out.
      timeout: seconds without progress that count as a hang. A phase that may compile gets
        `FIRST_TIME_FACTOR` times as long. A phase that took longer before, such as writing a large
        checkpoint, gets the time in its mark.
      since_start: seconds since the job started.
    """
    known_reports = {rank: report for rank, report in reports.items() if report is not None}
    missing_ranks = tuple(rank for rank in reports if rank not in known_reports)
    has_begun = not all(map(_is_starting, known_reports.values()))
    if has_begun and missing_ranks and since_start > FIRST_TIME_FACTOR * timeout:
        return Hang(missing_ranks, True, MAIN, since_start)
    lane_hangs = list(_find_lane_hangs(known_reports, timeout))
    # A rank without reports, while others wait, stopped at the same mark as they did.
    silent_after = timeout / 2 if lane_hangs else timeout
    silent = {rank: r.ago for rank, r in known_reports.items() if r.ago > silent_after}
    if silent:
        return Hang(tuple(silent), True, MAIN, max(silent.values()))
    # the others wait for a rank that stopped before its first report
    if lane_hangs and missing_ranks:
        return Hang(missing_ranks, True, MAIN, max(hang.seconds for hang in lane_hangs))
    # Prefer the lane with the fewest lagging ranks: if all ranks wait, the lane does not show the
    # cause.
    return min(lane_hangs, key=lambda hang: len(hang.ranks), default=None)


def _find_lane_hangs(reports: Mapping[int, RankReport], timeout: float) -> Iterator[Hang]:
    """Yield the hang of each lane whose last ranks take longer than they may."""
    for lane in sorted({lane for report in reports.values() for lane in report.lanes}):
        marks = {rank: r.lanes[lane] for rank, r in reports.items() if lane in r.lanes}
        last_position = min(mark.position for mark in marks.values())
        behind = {rank: mark for rank, mark in marks.items() if mark.position == last_position}
        seconds = max(mark.began + reports[rank].ago for rank, mark in behind.items())
        has_begun = any(mark.phase != START for mark in marks.values())
        is_late = all(
            mark.phase and seconds > _allowed_seconds(mark, timeout) for mark in behind.values()
        )
        if has_begun and is_late:
            yield Hang(tuple(behind), False, lane, seconds)


def _allowed_seconds(mark: ProgressMark, timeout: float) -> float:
    if mark.expected_seconds < 0:  # the phase may compile
        return timeout * FIRST_TIME_FACTOR
    return max(timeout, mark.expected_seconds)


class Watch:
    """Collects the reports of the processes of one attempt, on threads, until `close`.

    Args:
      count: how many processes.
      timeout: seconds without progress that count as a hang.
      host: the address to listen on.
      port: the port to listen on; 0 for any free port.
      say: prints a message.

    Attributes:
      environment: the environment variables through which a process finds the watch.
      port: the port on which it listens.
      stacks: by rank, the stacks that a process sent.
    """

    def __init__(
        self,
        count: int,
        timeout: float,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        say: Callable[[str], None],
    ):
        self._timeout = timeout
        self._say = say
        self._start = time.monotonic()
        self._last_reports: dict[int, tuple[float, RankReport] | None] = dict.fromkeys(range(count))
        self._connections: dict[int, Connection] = {}
        self._warned_no_reports = False
        self.stacks: dict[int, str] = {}
        token = secrets.token_hex(16)
        self._server = MessageServer(self._serve, token, host=host, port=port)
        self.port = self._server.port
        address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"
        beat = max(0.05, min(1.0, timeout / 10))
        self.environment = {
            ADDRESS: address,
            TOKEN: token,
            BEAT: str(beat),
            HANG_TIMEOUT: str(timeout),
        }

    def check(self) -> Hang | None:
        """Return the hang of the job, or None."""
        since_start = time.monotonic() - self._start
        reports = self.reports()
        has_no_progress = reports and all(map(_is_starting, reports.values()))
        if (
            has_no_progress
            and since_start > FIRST_TIME_FACTOR * self._timeout
            and not self._warned_no_reports
        ):
            self._warned_no_reports = True
            text = (
                f"launch: no process has reported progress for {since_start:.0f} s, so that none"
                " can be seen to hang."
            )
            self._say(
                f"{text}\nFix: call so.initialize() in each, and so.fit, or"
                " so.runtime.report_progress in a loop of your own."
            )
        return find_hang(reports, self._timeout, since_start)

    def reports(self) -> dict[int, RankReport | None]:
        """Return the last report of each rank that has not ended; None if it never reported."""
        now = time.monotonic()
        return {
            rank: last and last[1]._replace(ago=now - last[0])
            for rank, last in list(self._last_reports.items())
        }

    def forget(self, rank: int) -> None:
        """Stop watching a rank that has ended."""
        self._last_reports.pop(rank, None)

    def ask(self, request: bytes) -> None:
        """Send a request to all processes: b"stacks" or b"end"."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError, ValueError):
                connection.send_bytes(request)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _serve(self, connection: Connection) -> None:
        while True:
            message = json.loads(connection.recv_bytes(_MESSAGE_BYTES))
            rank = message["rank"]
            if type(rank) is not int:  # True and 1.5 are no ranks, though Python makes 1 of them
                return
            if rank not in self._last_reports:  # the rank has ended, or is not a rank of this job
                return
            self._connections[rank] = connection
            if message.get("bye"):
                self.forget(rank)
            elif "stacks" in message:
                self.stacks[rank] = str(message["stacks"])
            else:
                self._last_reports[rank] = time.monotonic(), _read(message)


def _is_starting(report: RankReport | None) -> bool:
    return report is None or all(mark.phase == START for mark in report.lanes.values())


def _read(message: Mapping) -> RankReport:
    lanes = {
        str(name): ProgressMark(
            int(step), int(number), str(phase), float(began), float(expected), int(thread)
        )
        for name, (step, number, phase, began, expected, thread) in message["lanes"].items()
    }
    return RankReport(ago=0.0, lanes=lanes, pid=int(message["pid"]), host=str(message["host"]))


def describe(
    caller: str,
    hang: Hang,
    reports: Mapping[int, RankReport | None],
    count: int,
    stacks: Mapping[int, str],
    states: Mapping[int, str],
) -> str:
    """Return the message about a hang: the ranks that lag, their phase, their stacks, and the
    position of the others.

    Args:
      caller: "launch" or "watchdog".
      hang: the hang.
      reports: the last report by rank.
      count: how many processes the job has.
      stacks: the output of faulthandler by rank; "" or missing if there is none.
      states: for ranks on this host, the letter of their state in /proc/PID/stat.
    """
    names = " and ".join(map(str, hang.ranks))
    are_several = len(hang.ranks) > 1
    first_report = reports.get(hang.ranks[0])
    lines = []
    if len(hang.ranks) == count and not hang.silent:
        position = _position_text(first_report, hang.lane)
        lines.append(
            f"{caller}: all {count} processes wait for {hang.seconds:.0f} s, {position}, and none"
            " lags behind."
        )
        lines.append(
            "A connection between them may be lost, or they have entered different collectives."
        )
    else:
        symptom = "not heard of" if hang.silent else "without progress"
        position = (
            f", last on {first_report.host} {_position_text(first_report, hang.lane)}"
            if first_report
            else ", and never was"
        )
        lines.append(
            f"{caller}: process {names} of {count} hang{'' if are_several else 's'}: {symptom} for"
            f" {hang.seconds:.0f} s{position}."
        )
    for rank in hang.ranks[:4]:
        lines += _stack_lines(
            rank, hang, reports.get(rank), stacks.get(rank, ""), states.get(rank, "")
        )
    other_ranks = [rank for rank in reports if rank not in hang.ranks]
    if other_ranks:
        lines.append("The others:")
    for rank in other_ranks[:8]:
        innermost_frame = main_frames(stacks.get(rank, ""), reports[rank], MAIN)[:1]
        lines.append(
            f"  process {rank}:"
            f" {_position_text(reports[rank], MAIN)}{', in ' + innermost_frame[0] if innermost_frame else ''}"
        )
    return "\n".join(lines)


def _stack_lines(
    rank: int, hang: Hang, report: RankReport | None, stacks: str, state: str
) -> list[str]:
    lines = []
    if state == "T":
        lines.append(
            f"Process {rank} is stopped by a signal (SIGSTOP), so its stack cannot be taken."
        )
    elif hang.silent and state == "D":
        lines.append(f"Process {rank} waits in the kernel, for a disk or a file system.")
    elif hang.silent and stacks:
        lines.append(
            f"Process {rank} is alive: it is cut off from the watch, or native code keeps its"
            " interpreter."
        )
    elif hang.silent and not state:
        lines.append(
            f"Process {rank} does not answer: its host or network is lost, it is stopped, or native"
            " code keeps its interpreter."
        )
    frames = main_frames(stacks, report, hang.lane)
    if frames:
        lines += [f"Process {rank} is in:", *(f"  {frame}" for frame in frames[:_SHOWN_FRAMES])]
    elif state != "T" and (state or stacks):
        lines.append(f"Process {rank} did not give its stack.")
    return lines


def _position_text(report: RankReport | None, lane: str) -> str:
    mark = report.lanes.get(lane) if report else None
    return (
        f"at step {mark.step} in {mark.phase or 'nothing that is watched'!r}"
        if mark
        else "before it reported anything"
    )


def main_frames(stacks: str, report: RankReport | None, lane: str) -> list[str]:
    """Return the frames of a lane's thread from the output of faulthandler, the innermost first."""
    mark = report.lanes.get(lane) if report else None
    if mark is None:
        return []
    for block in re.split(r"\n\s*\n", stacks):
        head, *frames = block.strip().splitlines() or [""]
        thread_id = re.search(r"hread 0x([0-9a-f]+)", head)
        if thread_id and int(thread_id[1], 16) == mark.thread:
            return [frame.strip() for frame in frames if frame.strip().startswith("File ")]
    return []


def process_state(pid: int) -> str:
    """Return the state letter of a process on this host (/proc/PID/stat): R, S, D, T (stopped), Z.

    "" if unknown.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def main(processes: str, seconds: str, port: str, host: str) -> int:
    """Watch the processes of a cluster until this program's input ends.

    Print a hang and end the job.
    """
    count = int(processes)
    timeout = float(seconds)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    watch = Watch(count, timeout, host=host, port=int(port), say=say)
    print(json.dumps({"port": watch.port, **watch.environment}), flush=True)
    input_ended = threading.Event()

    def read_input() -> None:
        sys.stdin.read()
        input_ended.set()

    threading.Thread(target=read_input, daemon=True).start()
    while not input_ended.wait(min(0.5, timeout / 10)):
        hang = watch.check()
        if hang is None:
            continue
        reports = watch.reports()
        watch.ask(b"stacks")
        input_ended.wait(_ANSWER_SECONDS)
        say(describe("watchdog", hang, reports, count, watch.stacks, {}))
        for rank, text in sorted(watch.stacks.items()):
            say(f"watchdog: the stacks of process {rank}:\n{text}")
        watch.ask(b"end")
        return 1
    return 0
