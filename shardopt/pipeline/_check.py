"""Checks of schedules and of their sizes; an error lists every fault at once."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from shardopt.core import is_integer, plural, type_error, value_error
from shardopt.pipeline._ticks import Ticks, lifetimes

_MAX_CELLS = 2**20
_PASS_NAMES = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}


def check(ticks: Ticks) -> None:
    """Raise ValueError for ticks that cannot be run, as `Schedule` says."""
    # in this order: a table of the wrong shape has no ticks
    faults = list(_shape_faults(ticks))
    if faults:
        _refuse(
            faults, "give every table one row per virtual stage and one column per micro-batch."
        )
    faults = [*_missing_passes(ticks), *_early_passes(ticks), *_shared_ticks(ticks)]
    if faults:
        arrival = "the next" if ticks.message_ticks == 1 else "the next but one"
        fix = (
            "run each pass once, when its inputs are there; what is sent on a tick arrives on"
            f" {arrival}."
        )
        _refuse(faults, fix)


def _refuse(faults: list[str], fix: str) -> None:
    raise value_error(f"the schedule has {plural(len(faults), 'fault')}.", faults, fix)


def _shape_faults(ticks: Ticks) -> Iterator[str]:
    counts = Counter(ticks.stage_of)
    per_stage = [counts[stage] for stage in range(ticks.num_stages)]
    if (
        not per_stage
        or min(per_stage) < 1
        or min(per_stage) != max(per_stage)
        or sum(per_stage) != len(ticks.stage_of)
    ):
        yield (
            f"stage_of must name each of {plural(ticks.num_stages, 'stage')} equally often, got"
            f" {ticks.stage_of}"
        )
    shape = len(ticks.stage_of), len(ticks.forward[0]) if ticks.forward else 0
    if shape[1] < 1:
        yield "there is no micro-batch"
    tables = {"forward": ticks.forward, "backward": ticks.backward, "weight": ticks.weight}
    for name, table in tables.items():
        widths = sorted({len(row) for row in table or ()})
        if table is not None and (len(table), widths) != (shape[0], [shape[1]]):
            actual_shape = f"{plural(len(table), 'row')} of {' or '.join(map(str, widths))}"
            yield f"{name} has {actual_shape}, not {plural(shape[0], 'row')} of {shape[1]}"


def _missing_passes(ticks: Ticks) -> Iterator[str]:
    for kind, pass_ticks in ticks.passes.items():
        for v, m in np.argwhere(pass_ticks < 0):
            yield (
                f"{_PASS_NAMES[kind]} of micro-batch {m} at virtual stage {v} never runs (tick"
                f" {pass_ticks[v, m]})"
            )


def _early_passes(ticks: Ticks) -> Iterator[str]:
    """Yield every pass that runs before its input arrives.

    `_missing_passes` alone reports inputs that never arrive.
    """
    passes = ticks.passes
    first_ticks = {buffer: first_ticks for buffer, (first_ticks, _) in lifetimes(ticks).items()}
    requirements = [
        ("forward", first_ticks["input"], "input arrives"),
        ("backward", passes["forward"], "forward runs"),
        ("backward", first_ticks["cotangent"], "cotangent arrives"),
        ("weight", passes["backward"], "backward runs"),
    ]
    for kind, input_ticks, event in requirements:
        pass_ticks = passes.get(kind, input_ticks)
        for v, m in np.argwhere((pass_ticks >= 0) & (pass_ticks < input_ticks)):
            timing = (
                f"{_PASS_NAMES[kind]} of micro-batch {m} at virtual stage {v} is at tick"
                f" {pass_ticks[v, m]}"
            )
            yield f"{timing}, but its {event} at tick {input_ticks[v, m]}"


def _shared_ticks(ticks: Ticks) -> Iterator[str]:
    for kind, pass_ticks in ticks.passes.items():
        passes_at = defaultdict(list)
        for v, m in np.argwhere(pass_ticks >= 0):
            passes_at[int(pass_ticks[v, m]), ticks.stage_of[v]].append(
                f"micro-batch {m} at virtual stage {v}"
            )
        for (tick, stage), clashing in sorted(passes_at.items()):
            if len(clashing) > 1:
                yield (
                    f"stage {stage} has {len(clashing)} {_PASS_NAMES[kind]}s at tick {tick}:"
                    f" {', '.join(clashing)}"
                )


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are not positive integers, and tables that are too large."""
    bad_sizes = [
        f"{name}={size!r} ({type(size).__name__})"
        for name, size in sizes.items()
        if not is_integer(size)
    ]
    if bad_sizes:
        raise type_error(f"sizes must be integers, got {', '.join(bad_sizes)}.")
    bad_sizes = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if bad_sizes:
        raise value_error(f"sizes must be at least 1, got {', '.join(bad_sizes)}.")
    stages, micro_batches, chunks = (
        int(sizes.get(f"num_{name}", 1)) for name in ("stages", "micro_batches", "chunks")
    )
    check_cells(stages, stages + micro_batches * chunks)


def check_groups(num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    """Refuse bad sizes, and several chunks if the number of micro-batches is not a multiple of the
    number of stages.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    if num_chunks > 1 and num_micro_batches % num_stages:
        problem = (
            f"with {num_chunks} chunks per stage, micro-batches must be a multiple of the"
            f" {num_stages} stages, got {num_micro_batches}."
        )
        below = num_micro_batches // num_stages * num_stages
        nearest_counts = f"{below} or {below + num_stages}" if below else f"{num_stages}"
        raise value_error(problem, fix=f"use {nearest_counts} micro-batches, or num_chunks=1.")


def check_cells(num_stages: int, num_ticks: int) -> None:
    """Refuse a table with more than 2**20 cells before it is allocated."""
    if num_stages * num_ticks > _MAX_CELLS:
        problem = f"a table of {num_stages} stages and {num_ticks} ticks or more is too large."
        raise value_error(problem, fix=f"keep stages x ticks at {_MAX_CELLS} or below.")
