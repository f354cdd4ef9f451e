"""What makes a schedule or its sizes wrong, every fault at once."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from shardopt.core.arguments import is_integer
from shardopt.core.errors import format_error, plural
from shardopt.pipeline.ticks import Slots, Ticks, lifetimes

_MOST_CELLS = 2**20
_PASS = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}


def check(who: str, ticks: Ticks, slots: Slots | None = None) -> None:
    """Refuse a schedule that cannot be run, as `Schedule.validate` says."""
    # in this order, since a wrong shape has no ticks, and a wrong tick makes every slot look wrong
    if faults := list(_shape_faults(ticks, slots)):
        _refuse(who, faults, "give every table one row per virtual stage and one column per micro-batch.")
    if faults := [*_missing(ticks), *_too_early(ticks), *_clashes(ticks)]:
        after = "the next" if ticks.message_ticks == 1 else "the next but one"
        fix = f"run each pass once, when its inputs are there; what is sent on a tick arrives on {after}."
        _refuse(who, faults, fix)
    if slots and (faults := list(_slot_faults(ticks, slots))):
        _refuse(who, faults, "keep apart what is live at the same tick, or leave the slots to from_ticks.")


def _refuse(who: str, faults: list[str], fix: str) -> None:
    raise ValueError(format_error(who, f"the schedule has {plural(len(faults), 'fault')}.", faults, fix))


def _shape_faults(ticks: Ticks, slots: Slots | None) -> Iterator[str]:
    counts = Counter(ticks.stage_of)
    homes = [counts[stage] for stage in range(ticks.num_stages)]
    if not homes or min(homes) < 1 or min(homes) != max(homes) or sum(homes) != len(ticks.stage_of):
        yield f"stage_of must name each of {plural(ticks.num_stages, 'stage')} equally often, got {ticks.stage_of}"
    shape = len(ticks.stage_of), len(ticks.forward[0]) if ticks.forward else 0
    if shape[1] < 1:
        yield "there is no micro-batch"
    tables = {"forward": ticks.forward, "backward": ticks.backward, "weight": ticks.weight}
    for name, table in (tables | (slots._asdict() if slots else {})).items():
        widths = sorted({len(row) for row in table or ()})
        if table is not None and (len(table), widths) != (shape[0], [shape[1]]):
            found = f"{plural(len(table), 'row')} of {' or '.join(map(str, widths))}"
            yield f"{name} has {found}, not {plural(shape[0], 'row')} of {shape[1]}"


def _missing(ticks: Ticks) -> Iterator[str]:
    for kind, when in ticks.passes.items():
        for v, m in np.argwhere(when < 0):
            yield f"{_PASS[kind]} of micro-batch {m} at virtual stage {v} never runs (tick {when[v, m]})"


def _too_early(ticks: Ticks) -> Iterator[str]:
    """Yield what runs before its input is there; inputs that never come are reported by `_missing` alone."""
    passes, first = ticks.passes, {buffer: first for buffer, (first, _) in lifetimes(ticks).items()}
    needs = [
        ("forward", first["input"], "input arrives"),
        ("backward", passes["forward"], "forward runs"),
        ("backward", first["cotangent"], "cotangent arrives"),
        ("weight", passes["backward"], "backward runs"),
    ]
    for kind, there, event in needs:
        use = passes.get(kind, there)
        for v, m in np.argwhere((use >= 0) & (use < there)):
            what = f"{_PASS[kind]} of micro-batch {m} at virtual stage {v} is at tick {use[v, m]}"
            yield f"{what}, but its {event} at tick {there[v, m]}"


def _clashes(ticks: Ticks) -> Iterator[str]:
    for kind, when in ticks.passes.items():
        found = defaultdict(list)
        for v, m in np.argwhere(when >= 0):
            found[int(when[v, m]), ticks.stage_of[v]].append(f"micro-batch {m} at virtual stage {v}")
        for (tick, stage), who in sorted(found.items()):
            if len(who) > 1:
                yield f"stage {stage} has {len(who)} {_PASS[kind]}s at tick {tick}: {', '.join(who)}"


def _slot_faults(ticks: Ticks, slots: Slots) -> Iterator[str]:
    for buffer, (first, last) in lifetimes(ticks).items():
        slot, kept = np.asarray(getattr(slots, buffer)), last >= first
        for v, m in np.argwhere((slot >= 0) != kept):
            missing = f"needs a slot at ticks {first[v, m]} to {last[v, m]}"
            what = missing if kept[v, m] else f"has slot {slot[v, m]}, but nothing to keep"
            yield f"{buffer} of micro-batch {m} at virtual stage {v} {what}"
        found = defaultdict(list)
        for v, m in np.argwhere(kept & (slot >= 0)):
            found[ticks.stage_of[v], int(slot[v, m])].append((int(first[v, m]), int(last[v, m]), int(m), int(v)))
        for (stage, index), uses in sorted(found.items()):
            holder, *others = sorted(uses)
            for use in others:
                if use[0] <= holder[1]:
                    yield f"stage {stage} keeps two things in {buffer} slot {index}: {_use(holder)} and {_use(use)}"
                holder = max(holder, use, key=lambda use: use[1])  # who stays longest


def _use(use: tuple[int, int, int, int]) -> str:
    first, last, m, v = use
    return f"micro-batch {m} at virtual stage {v} (ticks {first} to {last})"


def check_sizes(who: str, **sizes: int) -> None:
    """Refuse sizes that are no positive integers, and tables that no machine holds."""
    if bad := [f"{name}={size!r} ({type(size).__name__})" for name, size in sizes.items() if not is_integer(size)]:
        raise TypeError(format_error(who, f"sizes must be integers, got {', '.join(bad)}."))
    if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
        raise ValueError(format_error(who, f"sizes must be at least 1, got {', '.join(bad)}."))
    stages, count, chunks = (int(sizes.get(f"num_{name}", 1)) for name in ("stages", "micro_batches", "chunks"))
    check_cells(who, stages, stages + count * chunks)


def check_groups(who: str, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    """Refuse micro-batches that do not go through several chunks in whole groups of one per stage."""
    if num_chunks > 1 and num_micro_batches % num_stages:
        what = (
            f"with {num_chunks} chunks per stage, micro-batches must be a multiple of the {num_stages} stages, "
            f"got {num_micro_batches}."
        )
        below = num_micro_batches // num_stages * num_stages
        near = f"{below} or {below + num_stages}" if below else f"{num_stages}"
        raise ValueError(format_error(who, what, fix=f"use {near} micro-batches, or num_chunks=1."))


def check_cells(who: str, num_stages: int, num_ticks: int) -> None:
    """Refuse a table that would fill the memory, before it does."""
    if num_stages * num_ticks > _MOST_CELLS:
        what = f"a table of {num_stages} stages and {num_ticks} ticks or more is too large."
        fix = f"keep stages x ticks at {_MOST_CELLS} or below."
        raise ValueError(format_error(who, what, fix=fix))
