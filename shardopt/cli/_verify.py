"""`shardopt verify`: check strategies and kernels on the devices at hand.

It needs no extras.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardopt.core import calling, plural, value_error
from shardopt.runtime._processes import end_at_once


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Compare every strategy, mesh and kernel that fits with one device, on the devices at hand.

    It also checks that all devices compute the same bits, and times collectives. The exit code is 0
    if all rows that can run here passed, and 1 if a row failed. It is 2 for an error in the
    request, and 3 if no row failed but the time was over before all rows ran.
    """

    minutes: float = 10.0
    """No row begins after this time; the most important rows run first."""

    devices: int = 8
    """How many CPU devices to simulate if there is no accelerator. Otherwise all accelerators are
    used.
    """

    only: str = ""
    """Run only the rows whose group and name contain this text, such as "training: fsdp" or
    "kernels".
    """

    output: Path = Path("verify.json")
    """File for the results as JSON."""


def parse_verify(words: Sequence[str]) -> VerifyOptions:
    """Return the options in the words, without the packages of the extra cli."""
    parser = argparse.ArgumentParser("shardopt verify", description=VerifyOptions.__doc__)
    for field in dataclasses.fields(VerifyOptions):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    return VerifyOptions(**vars(parser.parse_args(words)))


def run_without_extras(words: Sequence[str]) -> int:
    """Run the command where the packages of the extra cli are not installed, and return its exit
    code.
    """
    from shardopt.runtime._devices import start_devices

    options = parse_verify(words)
    try:
        with calling("verify"):
            start_devices(options.devices)
        return verify(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        end_at_once(2)
        return 2


@calling("verify")
def verify(options: VerifyOptions) -> int:
    """Run the rows, print a line for each that began, write the JSON, and return the exit code."""
    if not options.minutes > 0:
        raise value_error(f"--minutes must be positive, got {options.minutes:g}.")
    if not options.output.parent.is_dir():
        problem = f"the folder of --output {options.output} does not exist."
        raise value_error(problem, fix=f"mkdir -p {options.output.parent}, or name another file.")
    import jax

    from shardopt.verify import Result, all_rows, run_rows

    devices = jax.devices()
    rows = [row for row in all_rows(devices) if options.only in f"{row.group}: {row.name}"]
    if not rows:
        problem = f"no row contains {options.only!r}."
        groups = ", ".join(dict.fromkeys(row.group for row in all_rows(devices)))
        raise value_error(problem, fix=f"use a group, such as {groups}, or a part of a name.")
    is_first = jax.process_index() == 0

    def show(line: str) -> None:
        if is_first:
            print(line, flush=True)

    def end_row(result: Result) -> None:
        if result.status != "out of time":
            show(_line(result.status, result.group, result.name, result.detail))

    processes = plural(jax.process_count(), "process")
    show(f"{len(devices)} x {devices[0].device_kind}, {processes}, jax {jax.__version__}")
    show(_line("status", "group", "row", "measured"))
    report = run_rows(rows, devices, seconds=60 * options.minutes, end_row=end_row)
    late = Counter(result.group for result in report.results if result.status == "out of time")
    if late:
        groups = ", ".join(f"{count} {group}" for group, count in late.items())
        remedy = "raise --minutes; the JSON lists them as not_run"
        show(_line("out of time", plural(late.total(), "row"), groups, remedy))
    counts = ", ".join(f"{count} {status}" for status, count in report.counts.items())
    show(f"{counts}; {report.seconds:.0f} s; exit code {report.exit_code}; {options.output}")
    if is_first:
        options.output.write_text(json.dumps(report.to_json(devices), indent=2) + "\n")
    return report.exit_code


def _line(status: str, group: str, name: str, detail: str) -> str:
    return f"{status:21} {group:12} {name:58} {detail}"
