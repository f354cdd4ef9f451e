"""Who hangs: what the processes of a job report, which of them lags behind, and which is slow.

`Watch` listens; `find_hang`, `find_slow` and `find_slow_devices` are functions of what was heard. A rank hangs when it has begun nothing new for
longer than the timeout *and no rank is behind it*: those that wait for it in a collective have come further. A rank that is
not heard at all is stopped, cut off, or in native code that keeps the interpreter. Messages are JSON, from connections
that have proved (HMAC, both ways) that they know the run's token.

Also a program, for `so.watchdog`: `python watch.py COUNT TIMEOUT PORT`. Only the standard library is imported.
"""

import contextlib
import json
import re
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # as a program it is not to wait until shardopt is imported
    sys.path.insert(0, str(Path(__file__).parent))
    from messages import Server  # pyright: ignore[reportMissingImports]
    from progress import ADDRESS, BEAT, MAIN, START, TOKEN, Mark  # pyright: ignore[reportMissingImports]
else:
    from shardopt.runtime.messages import Server
    from shardopt.runtime.progress import ADDRESS, BEAT, MAIN, START, TOKEN, Mark

NEW = 10
"""How many times the timeout a phase may take the first time, when it may compile; and the start, until it reports."""

_MESSAGE_BYTES = 2**19
_WINDOW = 20
"""Steps over which a rank is compared with others, to find the slow one."""
_FRAMES = 8
"""Frames of a stack that are said; all of it is in the file."""
_ANSWER = 5.0
"""Seconds that the program waits for stacks."""


class Heard(NamedTuple):
    """The last report of a rank.

    Attributes:
      ago: seconds since it was made.
      lanes: the last mark of each lane; `at` in seconds ago when the report was made.
      own: seconds of its own work since it began.
      steps: taken since it began.
      pid: its process on its host.
      host: the name of its host.
      probes: how often its devices were probed.
      devices: seconds that each of them needed last.
    """

    ago: float
    lanes: dict[str, Mark]
    own: float
    steps: int
    pid: int
    host: str
    probes: int = 0
    devices: tuple[float, ...] = ()


class Hang(NamedTuple):
    """Why a job stands still.

    Attributes:
      ranks: those that lag behind; all, where none does.
      silent: whether they are not heard at all.
      lane: in which they lag behind.
      seconds: for how long.
    """

    ranks: tuple[int, ...]
    silent: bool
    lane: str
    seconds: float


def find_hang(heard: Mapping[int, Heard | None], timeout: float, since_start: float) -> Hang | None:
    """Return why the job stands still, if it does.

    Args:
      heard: by rank; None for one that never reported. Those that have ended are left out.
      timeout: seconds without progress that are too long; `NEW` times as long for what may compile, and what the mark says
        where the phase has taken longer before, as writing a large checkpoint does.
      since_start: seconds since the job was started.
    """
    known = {rank: one for rank, one in heard.items() if one is not None}
    missing = tuple(rank for rank in heard if rank not in known)
    if not all(map(_is_starting, known.values())) and missing and since_start > NEW * timeout:
        return Hang(missing, True, MAIN, since_start)
    found = []
    for lane in sorted({lane for one in known.values() for lane in one.lanes}):
        marks = {rank: one.lanes[lane] for rank, one in known.items() if lane in one.lanes}
        least = min((mark.step, mark.nth) for mark in marks.values())
        behind = {rank: mark for rank, mark in marks.items() if (mark.step, mark.nth) == least}
        late = max(mark.at + known[rank].ago for rank, mark in behind.items())
        patience = max(timeout * NEW if mark.usual < 0 else max(timeout, mark.usual) for mark in behind.values())
        begun = any(mark.phase != START for mark in marks.values())
        if begun and all(mark.phase for mark in behind.values()) and late > patience:
            found.append(Hang(tuple(behind), False, lane, late))
    # Who is not heard while others wait was stopped when it had come as far as they.
    silent = tuple(rank for rank, one in known.items() if one.ago > (timeout / 2 if found else timeout))
    if silent:
        return Hang(silent, True, MAIN, max(known[rank].ago for rank in silent))
    if found and missing:  # whom those that wait have seen no report of: it stopped before its first
        return Hang(missing, True, MAIN, max(one.seconds for one in found))
    # A lane in which some lag says more than one in which all wait.
    return min(found, key=lambda one: len(one.ranks), default=None)


def find_slow(own: Mapping[int, float], step: float) -> list[int]:
    """Return the ranks whose own work makes all wait: twice the median of the others, and a tenth of a step more.

    Args:
      own: by rank, seconds of its own work in a step.
      step: seconds that a step takes.

    Example:
      >>> find_slow({0: 0.01, 1: 0.05, 2: 0.01}, step=0.1)
      [1]
    """
    slow = []
    for rank, mine in own.items():
        others = [seconds for other, seconds in own.items() if other != rank]
        usual = statistics.median(others) if others else mine
        if mine > 2 * usual and mine - usual > 0.1 * step:
            slow.append(rank)
    return slow


def find_slow_devices(devices: Mapping[int, Sequence[float]]) -> list[int]:
    """Return the ranks with a device that needs half as long again as the slowest of the others, by the median of these.

    Args:
      devices: by rank, seconds that each of its devices needs for the same work.

    Example:
      >>> find_slow_devices({0: [0.010, 0.011], 1: [0.010, 0.018], 2: [0.010, 0.010]})
      [1]
    """
    slow = []
    for rank, mine in devices.items():
        others = [max(theirs) for other, theirs in devices.items() if other != rank]
        if others and max(mine) > 1.5 * statistics.median(others):
            slow.append(rank)
    return slow


class Watch:
    """Listens to the processes of one attempt, on threads, until `close`.

    Attributes:
      environment: what tells a process where to report.
    """

    def __init__(
        self, count: int, timeout: float, *, host: str = "127.0.0.1", port: int = 0, say: Callable[[str], None]
    ):
        self._timeout, self._say, self._began = timeout, say, time.monotonic()
        self._heard: dict[int, tuple[float, Heard] | None] = dict.fromkeys(range(count))
        self._connections: dict[int, Connection] = {}
        self._window: dict[int, tuple[float, int]] = {}
        self._window_began, self._slow, self._told = self._began, [], False
        self._probes, self._suspects, self._slow_devices = 0, [], []
        self.stacks: dict[int, str] = {}
        token = secrets.token_hex(16)
        self._server = Server(self._listen, token, host=host, port=port)
        self.port = self._server.port
        address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"
        beat = max(0.05, min(1.0, timeout / 10))
        self.environment = {ADDRESS: address, TOKEN: token, BEAT: str(beat)}

    def check(self) -> Hang | None:
        """Return why the job stands still, if it does; name who makes the others wait."""
        self._check_speed()
        self._check_devices()
        started = time.monotonic() - self._began
        heard = self.heard()
        if started > NEW * self._timeout and not self._told and heard and all(map(_is_starting, heard.values())):
            self._told = True
            text = f"launch: no process has reported progress for {started:.0f} s, so that none can be seen to hang."
            self._say(
                f"{text}\nFix: call so.initialize() in each, and so.fit, or so.report_progress in a loop of your own."
            )
        return find_hang(heard, self._timeout, started)

    def heard(self) -> dict[int, Heard | None]:
        """Return the last report of each rank that has not ended."""
        now = time.monotonic()
        return {rank: one and one[1]._replace(ago=now - one[0]) for rank, one in list(self._heard.items())}

    def forget(self, rank: int) -> None:
        """Watch a rank no more: it has ended."""
        self._heard.pop(rank, None)

    def ask(self, what: bytes) -> None:
        """Send a word to all: b"stacks" or b"end"."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError, ValueError):
                connection.send_bytes(what)

    def close(self) -> None:
        """Listen no more."""
        self._server.close()

    def _listen(self, connection: Connection) -> None:
        while True:
            message = json.loads(connection.recv_bytes(_MESSAGE_BYTES))
            rank = int(message["rank"])
            if rank not in self._heard:  # it has ended, or is none of ours
                return
            self._connections[rank] = connection
            if message.get("bye"):
                self.forget(rank)
            elif "stacks" in message:
                self.stacks[rank] = str(message["stacks"])
            else:
                self._heard[rank] = time.monotonic(), _read(message)

    def _check_speed(self) -> None:
        now = {rank: (one.own, one.steps) for rank, one in self.heard().items() if one is not None}
        if now.keys() != self._window.keys() or not now:
            self._window, self._window_began = now, time.monotonic()
            return
        steps = {rank: count - self._window[rank][1] for rank, (_, count) in now.items()}
        if min(steps.values()) < _WINDOW:
            return
        own = {rank: (seconds - self._window[rank][0]) / steps[rank] for rank, (seconds, _) in now.items()}
        step = (time.monotonic() - self._window_began) / min(steps.values())
        slow = find_slow(own, step)
        if slow != self._slow:
            for rank in slow:
                usual = statistics.median(seconds for other, seconds in own.items() if other != rank)
                self._say(
                    f"launch: process {rank} is slow: {own[rank]:.3g} s of its own in each step (drawing batches, "
                    f"logging), the others {usual:.3g} s; a step takes {step:.3g} s."
                )
            if not slow:
                self._say(f"launch: process {' and '.join(map(str, self._slow))} is slow no more.")
        self._window, self._window_began, self._slow = now, time.monotonic(), slow

    def _check_devices(self) -> None:
        """Name who was slow in two probes of all, one after the other."""
        heard = {rank: one for rank, one in self.heard().items() if one is not None and one.devices}
        if len(heard) < len(self._heard) or min((one.probes for one in heard.values()), default=0) <= self._probes:
            return
        self._probes = max(one.probes for one in heard.values())
        seconds = {rank: one.devices for rank, one in heard.items()}
        suspects = find_slow_devices(seconds)
        slow = [rank for rank in suspects if rank in self._suspects]
        for rank in [rank for rank in slow if rank not in self._slow_devices]:
            longest = max(seconds[rank])
            usual = statistics.median(max(theirs) for other, theirs in seconds.items() if other != rank)
            self._say(
                f"launch: process {rank} computes slowly: its device {seconds[rank].index(longest)} on {heard[rank].host} needs "
                f"{longest:.2g} s for products that take the others {usual:.2g} s. All wait for it in each step."
            )
        for rank in [rank for rank in self._slow_devices if rank not in suspects]:
            self._say(f"launch: process {rank} computes slowly no more.")
        kept = [rank for rank in self._slow_devices if rank in suspects]
        self._suspects, self._slow_devices = suspects, sorted({*slow, *kept})


def _is_starting(heard: Heard | None) -> bool:
    return heard is None or all(mark.phase == START for mark in heard.lanes.values())


def _read(message: Mapping) -> Heard:
    lanes = {}
    for name, (step, nth, phase, at, usual, thread) in message["lanes"].items():
        lanes[str(name)] = Mark(int(step), int(nth), str(phase), float(at), float(usual), int(thread))
    own, steps = float(message["own"]), int(message["steps"])
    probes, devices = message["devices"]
    about = int(message["pid"]), str(message["host"]), int(probes), tuple(map(float, devices))
    return Heard(0.0, lanes, own, steps, *about)


def describe(
    who: str,
    hang: Hang,
    heard: Mapping[int, Heard | None],
    count: int,
    stacks: Mapping[int, str],
    states: Mapping[int, str],
) -> str:
    """Return what is said of a hang: who lags, in what, its stack, and where the others are.

    Args:
      who: "launch" or "watchdog".
      hang: what was found.
      heard: the reports at that time.
      count: how many processes the job has.
      stacks: what faulthandler wrote, by rank; "" or missing where it wrote nothing.
      states: of ranks on this host, the letter of their state in /proc/PID/stat.
    """
    names = " and ".join(map(str, hang.ranks))
    plural = len(hang.ranks) > 1
    first = heard.get(hang.ranks[0])
    lines = []
    if len(hang.ranks) == count and not hang.silent:
        where = _where(first, hang.lane)
        lines.append(f"{who}: all {count} processes wait for {hang.seconds:.0f} s, {where}, and none lags behind.")
        lines.append("A connection between them may be lost, or they have entered different collectives.")
    else:
        what = "not heard of" if hang.silent else "without progress"
        where = f", last {_where(first, hang.lane)}" if first else ", and never was"
        lines.append(
            f"{who}: process {names} of {count} hang{'' if plural else 's'}: {what} for {hang.seconds:.0f} s{where}."
        )
    for rank in hang.ranks[:4]:
        lines += _stack_lines(rank, hang, heard.get(rank), stacks.get(rank, ""), states.get(rank, ""))
    others = [rank for rank in heard if rank not in hang.ranks]
    if others:
        lines.append("The others:")
    for rank in others[:8]:
        inner = main_frames(stacks.get(rank, ""), heard[rank], MAIN)[:1]
        lines.append(f"  process {rank}: {_where(heard[rank], MAIN)}{', in ' + inner[0] if inner else ''}")
    return "\n".join(lines)


def _stack_lines(rank: int, hang: Hang, heard: Heard | None, stacks: str, state: str) -> list[str]:
    lines = []
    if state == "T":
        lines.append(f"Process {rank} is stopped by a signal (SIGSTOP), so its stack cannot be taken.")
    elif hang.silent and state == "D":
        lines.append(f"Process {rank} waits in the kernel, for a disk or a file system.")
    elif hang.silent and stacks:
        lines.append(f"Process {rank} is alive: it is cut off from the watch, or native code keeps its interpreter.")
    elif hang.silent and not state:
        lines.append(
            f"Process {rank} does not answer: its host or network is lost, it is stopped, or native code keeps its interpreter."
        )
    if frames := main_frames(stacks, heard, hang.lane):
        lines += [f"Process {rank} is in:", *(f"  {frame}" for frame in frames[:_FRAMES])]
    elif state != "T" and (state or stacks):
        lines.append(f"Process {rank} did not give its stack.")
    return lines


def _where(heard: Heard | None, lane: str) -> str:
    mark = heard.lanes.get(lane) if heard else None
    return (
        f"at step {mark.step} in {mark.phase or 'nothing that is watched'!r}" if mark else "before it reported anything"
    )


def main_frames(stacks: str, heard: Heard | None, lane: str) -> list[str]:
    """Return the frames of a lane's thread in what faulthandler wrote, innermost first."""
    mark = heard.lanes.get(lane) if heard else None
    if mark is None:
        return []
    for block in re.split(r"\n\s*\n", stacks):
        head, *frames = block.strip().splitlines() or [""]
        found = re.search(r"hread 0x([0-9a-f]+)", head)
        if found and int(found[1], 16) == mark.thread:
            return [frame.strip() for frame in frames if frame.strip().startswith("File ")]
    return []


def process_state(pid: int) -> str:
    """Return the letter of a process of this host in /proc/PID/stat: R, S, D, T (stopped), Z; "" if it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def main(words: Sequence[str]) -> int:
    """Watch the processes of a cluster until this program's input ends; say and end it when they hang."""
    count, timeout, port = int(words[0]), float(words[1]), int(words[2])
    watch = Watch(count, timeout, host="0.0.0.0", port=port, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps({"port": watch.port, **watch.environment}), flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: sys.stdin.read() is not None and over.set(), daemon=True).start()
    while not over.wait(min(0.5, timeout / 10)):
        hang = watch.check()
        if hang is None:
            continue
        heard = watch.heard()
        watch.ask(b"stacks")
        over.wait(_ANSWER)
        print(describe("watchdog", hang, heard, count, watch.stacks, {}), file=sys.stderr, flush=True)
        for rank, text in sorted(watch.stacks.items()):
            print(f"watchdog: the stacks of process {rank}:\n{text}", file=sys.stderr, flush=True)
        watch.ask(b"end")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
