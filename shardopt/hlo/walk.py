"""From the entry through loops, branches and calls: every collective with how often it runs."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from shardopt.hlo.text import Instruction, Module, attributes, operands
from shardopt.hlo.trips import trip_count

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class Ticks(Protocol):
    """What is read of a pipeline's schedule: a loop of `num_ticks`, in which each pass is a branch."""

    @property
    def num_ticks(self) -> int:
        """How often the loop turns."""
        ...

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches pass through each chunk."""
        ...

    @property
    def num_chunks(self) -> int:
        """How many chunks a stage has."""
        ...


class Found(NamedTuple):
    """A collective where it stands.

    Attributes:
      instruction: the collective, in the form that holds its operands (`-start`, if it is asynchronous).
      kind: the opcode without `-start`; a reduce-scatter that XLA:TPU renders as a fusion of all-reduce and slice is
        a reduce-scatter.
      loops: trip counts of the loops around it, outermost first; None for one that the program does not tell.
      conditional: whether it stands in a branch.
      outside: how many of the loops stand around that branch, or the outermost of several.
      asynchronous: whether other instructions may run between its start and its end.
    """

    instruction: Instruction
    kind: str
    loops: tuple[int | None, ...] = ()
    conditional: bool = False
    outside: int = 0
    asynchronous: bool = False


def collectives_of(module: Module, schedule: Ticks | None = None) -> Iterator[Found]:
    """Yield the collectives that the entry computation reaches; one reached by two calls comes twice.

    Args:
      module: the program.
      schedule: of the pipeline that it is, if it is one: branches directly in the loop over its ticks are counted as
        often as a stage takes them.
    """
    for found in _walk(module, module.entry, _with_collectives(module)):
        yield found if schedule is None else _as_scheduled(found, schedule)


def times_taken(turns: int, schedule: Ticks | None) -> int:
    """Return how often a branch directly in a loop counts: each time, or once a micro-batch and chunk in that of ticks."""
    if schedule is None or turns != schedule.num_ticks:
        return turns
    return schedule.num_micro_batches * schedule.num_chunks


def _as_scheduled(found: Found, schedule: Ticks) -> Found:
    at = found.outside - 1
    if not found.conditional or at < 0 or (turns := found.loops[at]) is None:
        return found
    return found._replace(loops=(*found.loops[:at], times_taken(turns, schedule), *found.loops[at + 1 :]))


def _walk(module: Module, name: str, busy: set[str]) -> Iterator[Found]:
    chains: set[str] = set()
    for instruction in module.computations.get(name, ()):
        if kind := kind_of(instruction):
            started = instruction.opcode.endswith("-start") and not _is_sync(instruction)
            started = started or crosses_slices(instruction)
            yield Found(instruction, kind, asynchronous=started)
            continue
        for callee in callees(instruction):
            if callee not in busy:
                continue
            for found in _walk(module, callee, busy):
                # XLA:TPU spreads a collective over several fusions, each with a copy of the instruction
                chain = _chain(found.instruction)
                if chain is None or chain not in chains:
                    yield _from_outside(module, name, instruction, callee, found)
                chains |= {chain} if chain else set()


def kind_of(instruction: Instruction) -> str | None:
    """Return which collective it is, or None; `-done` and `-update` only end what a `-start` began."""
    if crosses_slices(instruction):
        found = _TRANSFER.search(instruction.rest)
        return found[1].lower().replace("_", "-") if found else "collective-permute"
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def crosses_slices(instruction: Instruction) -> bool:
    """Return whether it is what XLA:TPU makes of a collective between slices: a send to the runtime that connects them."""
    return instruction.opcode == "send" and MEGASCALE in instruction.rest


MEGASCALE = "xla_megascale_runtime"
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


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


def _from_outside(module: Module, name: str, caller: Instruction, callee: str, found: Found) -> Found:
    """Return what was found in `callee` as `caller`, which stands in computation `name`, makes of it."""
    if caller.opcode == "while":
        outside = found.outside + 1 if found.conditional else 0
        return found._replace(loops=(trip_count(module, name, caller), *found.loops), outside=outside)
    if caller.opcode == "conditional":
        return found._replace(conditional=True, outside=0)
    if caller.opcode == "async-start":
        return found._replace(asynchronous=True)
    if caller.opcode == "fusion":
        is_scatter = found.kind == "all-reduce" and _returns_a_slice(module, callee, found.instruction)
        return found._replace(
            kind="reduce-scatter" if is_scatter else found.kind,
            asynchronous=found.asynchronous or _chain(found.instruction) is not None,
        )
    return found


def _returns_a_slice(module: Module, name: str, instruction: Instruction) -> bool:
    return any(
        line.is_root and line.opcode == "dynamic-slice" and operands(line)[0] == instruction.name
        for line in module.computations[name]
    )


def _chain(instruction: Instruction) -> str | None:
    """Return the mark that XLA:TPU puts on all pieces of one collective that it fuses with computation."""
    found = _CHAIN.search(instruction.rest) if "async_collective_fusion_config" in instruction.rest else None
    return found[1] if found else None


_CHAIN = re.compile(r'chain_id="(\d+)"')


def _is_sync(instruction: Instruction) -> bool:
    """XLA:GPU keeps the start and done form for what its scheduler decided to run in place."""
    config = attributes(instruction).get("backend_config", "")
    try:
        return json.loads(config).get("collective_backend_config", {}).get("is_sync", False)
    except (json.JSONDecodeError, AttributeError):
        return False
