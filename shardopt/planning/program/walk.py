"""From the entry through loops, branches and calls: every collective with how often it runs."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from shardopt.planning.program.text import Instruction, Module, attributes
from shardopt.planning.program.trips import trip_count

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class Found(NamedTuple):
    """A collective where it stands.

    Attributes:
      instruction: the collective, in the form that holds its operands (`-start`, if it is asynchronous).
      kind: the opcode without `-start`.
      loops: trip counts of the loops around it, outermost first; None for one that the program does not tell.
      conditional: whether it stands in a branch.
      asynchronous: whether other instructions may run between its start and its end.
    """

    instruction: Instruction
    kind: str
    loops: tuple[int | None, ...]
    conditional: bool
    asynchronous: bool


class _Place(NamedTuple):
    loops: tuple[int | None, ...] = ()
    conditional: bool = False
    asynchronous: bool = False


def collectives_of(module: Module) -> Iterator[Found]:
    """Yield the collectives that the entry computation reaches; one reached by two calls comes twice."""
    busy = _with_collectives(module)
    yield from _walk(module, module.entry, _Place(), busy)


def _walk(module: Module, name: str, place: _Place, busy: set[str]) -> Iterator[Found]:
    for instruction in module.computations.get(name, ()):
        if kind := kind_of(instruction):
            started = instruction.opcode.endswith("-start") and not _is_sync(instruction)
            yield Found(instruction, kind, place.loops, place.conditional, place.asynchronous or started)
            continue
        for callee in callees(instruction):
            if callee in busy:
                yield from _walk(module, callee, _inside(module, instruction, place), busy)


def kind_of(instruction: Instruction) -> str | None:
    """Return which collective it is, or None; `-done` and `-update` only end what a `-start` began."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def callees(instruction: Instruction) -> list[str]:
    """Return the computations that it runs. A collective's or reduction's `to_apply` works on scalars: left out."""
    opcode = instruction.opcode
    if opcode in ("async-update", "async-done") or not _CALLS.search(instruction.rest):
        return []
    found = attributes(instruction)
    keys = ["calls", "body", "condition", "branch_computations", "true_computation", "false_computation"]
    keys += ["called_computations", *(["to_apply"] if opcode == "call" else [])]
    return [name.strip(" %") for key in keys if key in found for name in found[key].strip("{}").split(",")]


_CALLS = re.compile(r"\b(calls|body|branch_computations|true_computation|called_computations|to_apply)=")


def _with_collectives(module: Module) -> set[str]:
    """Return the computations from which a collective can be reached, so that the walk skips all others."""
    callers: dict[str, set[str]] = {}
    waiting = []
    for name, instructions in module.computations.items():
        for instruction in instructions:
            for callee in callees(instruction):
                callers.setdefault(callee, set()).add(name)
            if kind_of(instruction):
                waiting.append(name)
    busy: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in busy:
            busy.add(name)
            waiting += callers.get(name, ())
    return busy


def _inside(module: Module, instruction: Instruction, place: _Place) -> _Place:
    if instruction.opcode == "while":
        return place._replace(loops=(*place.loops, trip_count(module, instruction)))
    if instruction.opcode == "conditional":
        return place._replace(conditional=True)
    if instruction.opcode == "async-start":
        return place._replace(asynchronous=True)
    return place


def _is_sync(instruction: Instruction) -> bool:
    """XLA:GPU keeps the start and done form for what its scheduler decided to run in place."""
    config = attributes(instruction).get("backend_config", "")
    try:
        return json.loads(config).get("collective_backend_config", {}).get("is_sync", False)
    except (json.JSONDecodeError, AttributeError):
        return False
