"""Read a recorded jax profile: the seconds of each operation of a compiled program, per device and
step.
"""

import bisect
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardopt.core._errors import error_text

_MODULE_LINE, _OPERATION_LINE = "XLA Modules", "XLA Ops"
_FIRST_NAME = re.compile(r"%?([\w.\-]+)")


class Measured(NamedTuple):
    """An operation of a program in a profile.

    Attributes:
      seconds: seconds per device and step.
      calls: calls per device and step.
    """

    seconds: float
    calls: float


class ProfiledProgram(NamedTuple):
    """A program in a profile.

    Attributes:
      operations: instruction name -> its time.
      devices: the number of devices.
    """

    operations: dict[str, Measured]
    devices: int


class _Event(NamedTuple):
    """An operation ran on a device: `device` and `run` identify the device and the execution."""

    module: str
    name: str
    device: tuple[object, ...]
    run: object
    nanoseconds: float


def read_profile(path: str | Path) -> dict[str, ProfiledProgram]:
    """Return the programs in a profile, by the name of their HLO module.

    Args:
      path: an `.xplane.pb` file, or a folder with such files; of several recordings the newest is
        read, with the files of all processes.

    Raises:
      ValueError: if there is no profile.
    """
    files = _files(Path(path))
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    runs: dict[tuple[str, str], set[tuple[Any, Any]]] = defaultdict(set)
    num_steps = 0
    with warnings.catch_warnings():
        # the reader of jax 0.12 warns when Python 3.12 makes its types, and ends the process if
        # warnings are errors
        warnings.simplefilter("ignore", DeprecationWarning)
        for file in files:
            profile = jax.profiler.ProfileData.from_file(str(file))
            num_steps = max(num_steps, _annotated_steps(profile))
            for event in _events(profile, file.name):
                key = event.module, event.name
                seconds[key] += event.nanoseconds / 1e9
                calls[key] += 1
                runs[key].add((event.device, event.run))
    programs: dict[str, dict[str, Measured]] = defaultdict(dict)
    for module, name in seconds:
        key = module, name
        # a recording may begin and end within a step, so each operation counts in the executions
        # that have it
        numbered = {(device, run) for device, run in runs[key] if run is not None}
        count = len(numbered) or num_steps * len(runs[key])
        if not count:
            fix = (
                "record it with so.fit(profile=(10, 5)), or with a jax.profiler.StepTraceAnnotation"
                " around each step."
            )
            raise ValueError(
                error_text(
                    "the profile numbers no steps, so the time of a step is unknown.", fix=fix
                )
            )
        programs[module][name] = Measured(seconds[key] / count, calls[key] / count)
    return {
        module: ProfiledProgram(
            operations, len({device for name in operations for device, _ in runs[module, name]})
        )
        for module, operations in programs.items()
    }


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.xplane.pb"))
    if not files:
        fix = (
            "record one: so.fit(profile=(10, 5)), or jax.profiler.trace(folder) around some steps."
        )
        raise ValueError(
            error_text(f"there is no profile (*.xplane.pb) in {str(path)!r}.", fix=fix)
        )
    newest = max(file.parent for file in files)  # folders have the time as their name
    return [file for file in files if file.parent == newest]


def _annotated_steps(profile: Any) -> int:
    """Return the number of steps with an annotation, as `so.fit` makes them."""
    events = (event for plane in profile.planes for line in plane.lines for event in line.events)
    return len({dict(event.stats).get("step_num") for event in events} - {None})


def _events(profile: Any, host: str) -> Iterator[_Event]:
    """Yield the operations.

    On CPU and GPU an event names its operation and module; on TPU lines of the device do.
    """
    for plane in profile.planes:
        lines = list(plane.lines)
        modules = sorted(
            (event.start_ns, event.start_ns + event.duration_ns, event.name.partition("(")[0])
            for line in lines
            if line.name == _MODULE_LINE
            for event in line.events
        )
        for line in lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and "hlo_module" in stats:
                    device = host, plane.name, stats.get("device_ordinal")
                    name, module = str(stats["hlo_op"]), str(stats["hlo_module"])
                    yield _Event(module, name, device, stats.get("run_id"), event.duration_ns)
                elif line.name == _OPERATION_LINE:
                    i = (
                        bisect.bisect_right(modules, event.start_ns, key=lambda module: module[0])
                        - 1
                    )
                    named = _FIRST_NAME.match(event.name)
                    if named is not None and i >= 0 and event.start_ns < modules[i][1]:
                        yield _Event(
                            modules[i][2], named[1], (host, plane.name), i, event.duration_ns
                        )
