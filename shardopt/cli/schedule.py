"""`shardopt schedule`: a pipeline schedule as text, numbers and a picture, without a device."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

import shardopt as so
from shardopt.core.errors import complaint
from shardopt.pipeline import Schedule

_CHUNKED = ("interleaved", "zero_bubble_lockstep")


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """Show who does what when in a pipeline: ticks, idle time, activations kept."""

    kind: Literal["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_lockstep"] = "one_f_one_b"
    """Which schedule, by its name in so.schedules."""

    stages: int = 4
    """Places on the mesh axis pipeline."""

    micro_batches: int = 8
    """Parts of a batch that follow each other through the stages."""

    chunks: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model on each stage, for interleaved (by itself 2) and zero_bubble_lockstep (1)."""

    json: bool = False
    """Print JSON instead of text."""

    png: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Draw it into this file."""


def schedule(options: ScheduleOptions) -> None:
    """Print the schedule.

    Raises:
      ValueError: if the schedule refuses the sizes, or has no chunks.
    """
    table = make(options)
    if options.png is not None:
        table.plot(options.png)
    print(json.dumps(numbers(table), indent=2) if options.json else str(table))


def make(options: ScheduleOptions) -> Schedule:
    """Return the schedule that the options name."""
    builder = getattr(so.schedules, options.kind)
    if options.kind in _CHUNKED:
        chunks = options.chunks or (2 if options.kind == "interleaved" else 1)
        return builder(options.stages, options.micro_batches, num_chunks=chunks)
    if options.chunks not in (None, 1):
        what = f"--chunks {options.chunks} is for schedules that have chunks; {options.kind} has one a stage."
        fix = f"leave it out, or choose --kind {' or '.join(_CHUNKED)}."
        raise ValueError(complaint("schedule", what, fix=fix))
    return builder(options.stages, options.micro_batches)


def numbers(table: Schedule) -> dict[str, object]:
    """Return what is known of a schedule as plain numbers and lists."""
    return {
        "name": table.name,
        "stages": table.num_stages,
        "micro_batches": table.num_micro_batches,
        "chunks": table.num_chunks,
        "ticks": table.num_ticks,
        "bubble": table.bubble_fraction,
        "program_bubble": table.program_bubble_fraction,
        "peak_activations": list(table.peak_activations),
        "rows": {name: rows.tolist() for name, rows in table.rows().items()},
    }
