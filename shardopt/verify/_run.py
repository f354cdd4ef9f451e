"""Run the rows, the most important first, until the time is over.

And the report of their results.
"""

import os
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.core._extras import version_of
from shardopt.verify._devices import collective_rows, same_bits_rows
from shardopt.verify._kernels import kernel_rows
from shardopt.verify._rows import Devices, NotRun, Result, Row, Status, agree
from shardopt.verify._training import FIRST, SECOND, same_training_rows, training_rows

FAILED = 1
OUT_OF_TIME = 3
"""Exit codes."""

_PACKAGES = ("shardopt", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax", "numpy")


class VerifyReport(NamedTuple):
    """The results of all rows.

    Attributes:
      results: one for each row, in the order of the rows.
      seconds: how long all rows took.
    """

    results: tuple[Result, ...]
    seconds: float

    @property
    def counts(self) -> Counter[str]:
        """The number of rows with each status."""
        return Counter(result.status for result in self.results)

    @property
    def exit_code(self) -> int:
        """1 if a row failed, 3 if none failed and the time was over before all rows ran, otherwise
        0.
        """
        if self.counts["failed"]:
            return FAILED
        return OUT_OF_TIME if self.counts["out of time"] else 0

    def to_json(self, devices: Devices) -> dict[str, Any]:
        """Return the report as plain values, with the versions and devices that it is about."""
        return {
            "exit_code": self.exit_code,
            "counts": dict(self.counts),
            "seconds": round(self.seconds, 1),
            "versions": _versions(),
            "devices": {
                "platform": devices[0].platform,
                "kinds": sorted({device.device_kind for device in devices}),
                "count": len(devices),
                "processes": jax.process_count(),
            },
            "flags": {
                name: os.environ[name]
                for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
                if name in os.environ
            },
            "not_run": [f"{r.group}: {r.name}" for r in self.results if r.status == "out of time"],
            "rows": [
                {**result._asdict(), "seconds": round(result.seconds, 2)} for result in self.results
            ],
        }


def _versions() -> dict[str, str]:
    versions = {name: version_of(name) for name in _PACKAGES}
    installed = {name: version for name, version in versions.items() if version is not None}
    return {"python": platform.python_version()} | installed


def all_rows(devices: Devices) -> list[Row]:
    """Return the rows for these devices, the most important first."""
    return [
        *same_bits_rows(),
        *collective_rows(devices),
        *training_rows(FIRST),
        *same_training_rows(),
        *kernel_rows(),
        *training_rows(SECOND),
    ]


def run_rows(
    rows: Iterable[Row],
    devices: Devices,
    *,
    seconds: float,
    end_row: Callable[[Result], None] = lambda result: None,
) -> VerifyReport:
    """Run the rows in their order.

    No row begins after `seconds`; a row that has begun runs to its end.

    Several processes decide together: about the time, and about the status of a row, which fails if
    it fails in one.
    """
    results = []
    begin = time.monotonic()
    for row in rows:
        if agree(np.array(time.monotonic() - begin)) >= seconds:
            result = Result(row.group, row.name, "out of time", "")
        else:
            result = _run_row(row, devices)
        end_row(result)
        results.append(result)
    return VerifyReport(tuple(results), time.monotonic() - begin)


def _run_row(row: Row, devices: Devices) -> Result:
    begin = time.monotonic()
    status, detail, numbers = _measure(row, devices)
    if agree(np.array(status == "failed")) and status != "failed":
        status = "failed"
        detail = "another process failed"
    return Result(row.group, row.name, status, detail, time.monotonic() - begin, numbers)


def _measure(row: Row, devices: Devices) -> tuple[Status, str, dict[str, Any]]:
    """Return the status of a row on this process, its detail and its numbers."""
    try:
        passed, detail, numbers = row.measure(devices)
    except NotRun as reason:
        return reason.status, str(reason), {}
    except Exception as error:  # a row that raises an error must not end the others
        numbers = {"traceback": traceback.format_exc()}
        if "RESOURCE_EXHAUSTED" in str(error):
            return "did not fit", "the device has too little memory", numbers
        first_line = str(error).strip().partition("\n")[0]
        return "failed", f"{type(error).__name__}: {first_line}", numbers
    return "passed" if passed else "failed", detail, numbers
