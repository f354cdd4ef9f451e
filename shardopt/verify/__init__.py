"""Check shardopt on the devices at hand: the comparisons of `shardopt verify`, as rows of a table."""

from shardopt.verify._rows import Devices, Measurement, NotRun, Result, Row
from shardopt.verify._run import all_rows, run_rows

__all__ = [
    "Devices",
    "Measurement",
    "NotRun",
    "Result",
    "Row",
    "all_rows",
    "run_rows",
]
