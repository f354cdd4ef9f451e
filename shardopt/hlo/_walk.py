"""Find all collectives of a program, through loops, branches and calls, and how often each runs."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardopt.core import value_error
from shardopt.hlo._hlo_text import Instruction, Module, attributes, operands, root_of
from shardopt.pipeline import Schedule

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class CollectiveSite(NamedTuple):
    """A collective instruction, and the loops and branches around it.

    Attributes:
      instruction: the instruction that has the operands of the collective (`-start`, if it is
        asynchronous).
      kind: the opcode without `-start`. A fusion of all-reduce and slice by XLA:TPU is a
        reduce-scatter.
      loops: trip counts of the loops around it, outermost first; None for an unknown trip count.
      branches: whether it is in a branch: first outside of all loops, then directly in the
        outermost loop, and so on.
      asynchronous: whether other instructions may run between its start and its end.
    """

    instruction: Instruction
    kind: str
    loops: tuple[int | None, ...] = ()
    branches: tuple[bool, ...] = (False,)
    asynchronous: bool = False

    @property
    def conditional(self) -> bool:
        """Whether it is in a branch."""
        return any(self.branches)


def collectives_of(module: Module, schedule: Schedule | None = None) -> Iterator[CollectiveSite]:
    """Yield the collectives that the entry computation reaches.

    A collective that two calls reach is yielded twice.

    The outermost loop with as many iterations as the schedule has ticks is the loop over ticks.
    Branches directly in it count as often as a stage takes them.
    """
    for site in _walk(module, module.entry, computations_with_collectives(module)):
        yield site if schedule is None else _with_scheduled_count(site, schedule)


def times_taken(trip_count: int, schedule: Schedule | None) -> int:
    """Return how often a branch directly in a loop counts.

    In the loop over ticks it counts once per micro-batch and chunk, in other loops in every
    iteration.
    """
    if schedule is None or trip_count != schedule.num_ticks:
        return trip_count
    return schedule.num_micro_batches * schedule.num_chunks


def check_schedule(module: Module, schedule: Schedule | None) -> None:
    """Raise an error if no loop of the program can be the loop over the schedule's ticks."""
    if schedule is None or schedule.num_ticks == 1:  # XLA removes a loop of one iteration
        return
    trip_counts = [
        trip_count(module, name, line)
        for name, lines in module.computations.items()
        for line in lines
        if line.opcode == "while"
    ]
    if schedule.num_ticks in trip_counts:
        return
    known = sorted({count for count in trip_counts if count is not None})
    listed = [*map(str, known), *(["unknown"] if None in trip_counts else [])]
    description = f"its loops turn {', '.join(listed)} times" if trip_counts else "it has no loop"
    problem = (
        f"the schedule has {schedule.num_ticks} ticks, and no loop of the program turns so often:"
        f" {description}."
    )
    fix = "pass the schedule that the program was made with, such as opt.config.schedule, or none."
    raise value_error(problem, fix=fix)


def _with_scheduled_count(site: CollectiveSite, schedule: Schedule) -> CollectiveSite:
    if schedule.num_ticks not in site.loops:
        return site
    tick_loop = site.loops.index(schedule.num_ticks)
    if not site.branches[tick_loop + 1]:
        return site
    count = times_taken(schedule.num_ticks, schedule)
    return site._replace(loops=(*site.loops[:tick_loop], count, *site.loops[tick_loop + 1 :]))


def _walk(module: Module, name: str, reaching: set[str]) -> Iterator[CollectiveSite]:
    chains: set[str] = set()
    for instruction in module.computations.get(name, ()):
        for site in collectives_under(module, name, instruction, reaching):
            # XLA:TPU spreads a collective over several fusions, each with a copy of the instruction
            chain = chain_of(site.instruction)
            if chain is None or chain not in chains:
                yield site
            chains |= {chain} if chain else set()


def collectives_under(
    module: Module, name: str, instruction: Instruction, reaching: set[str]
) -> Iterator[CollectiveSite]:
    """Yield the collectives of an instruction in computation `name`: the instruction itself, or
    those it calls.
    """
    kind = kind_of(instruction)
    if kind:
        started = instruction.opcode.endswith("-start") and not _is_sync(instruction)
        yield CollectiveSite(instruction, kind, asynchronous=started or crosses_slices(instruction))
        return
    for callee in callees(instruction):
        if callee in reaching:
            for site in _walk(module, callee, reaching):
                yield _with_caller(module, name, instruction, callee, site)


def kind_of(instruction: Instruction) -> str | None:
    """Return the kind of a collective.

    None for other instructions, and for `-done` and `-update` of a collective.
    """
    if crosses_slices(instruction):
        match = _TRANSFER.search(instruction.arguments)
        return match[1].lower().replace("_", "-") if match else "collective-permute"
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def crosses_slices(instruction: Instruction) -> bool:
    """Return whether it is a collective between slices, which XLA:TPU compiles to a send to the
    Megascale runtime.
    """
    return instruction.opcode == "send" and MEGASCALE in instruction.arguments


MEGASCALE = "xla_megascale_runtime"
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


def callees(instruction: Instruction) -> list[str]:
    """Return the computations that it calls, without the scalar `to_apply` of collectives and
    reductions.

    The computation of a TPU's SparseCore is `to_apply` of a `call-start` (libtpu 0.0.42 and
    0.0.50), or among the `called_computations` of a `custom-call-start` (0.0.52).
    """
    opcode = instruction.opcode
    if opcode in ("async-update", "async-done") or not _CALLS.search(instruction.arguments):
        return []
    keys = ["calls", "body", "condition", *_BRANCHES, "called_computations"]
    if opcode in ("call", "call-start"):
        keys.append("to_apply")
    return _names(attributes(instruction), keys)


_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def branches_of(attributes: Mapping[str, str]) -> list[str]:
    """Return the branches of a conditional."""
    return _names(attributes, _BRANCHES)


def _names(attributes: Mapping[str, str], keys: Sequence[str]) -> list[str]:
    """Return the computations that some attributes name."""
    listed = [attributes[key] for key in keys if key in attributes]
    return [name.strip("{}% ") for names in listed for name in names.split(",")]


_CALLS = re.compile(
    r"\b(calls|body|branch_computations|true_computation|called_computations|to_apply)="
)


def computations_with_collectives(module: Module) -> set[str]:
    """Return the computations from which a collective can be reached; the walk skips all others."""
    callers: dict[str, set[str]] = {}
    unvisited = []
    for name, instructions in module.computations.items():
        for instruction in instructions:
            for callee in callees(instruction):
                callers.setdefault(callee, set()).add(name)
            if kind_of(instruction):
                # Backwards from collectives to their callers. The walk then skips all other
                # computations, which are most of a program.
                unvisited.append(name)
    reaching: set[str] = set()
    while unvisited:
        name = unvisited.pop()
        if name not in reaching:
            reaching.add(name)
            unvisited += callers.get(name, ())
    return reaching


def unread_starts(module: Module) -> tuple[str, ...]:
    """Return the names of the starts on a TPU's SparseCore from which no collective can be reached."""
    reaching = computations_with_collectives(module)
    return tuple(
        line.name
        for line in module.instructions
        if line.opcode.endswith("-start")
        and ON_SPARSE_CORE in line.arguments
        and reaching.isdisjoint(callees(line))
    )


ON_SPARSE_CORE = 'async_execution_thread="sparsecore"'


def _with_caller(
    module: Module, name: str, caller: Instruction, callee: str, site: CollectiveSite
) -> CollectiveSite:
    """Return a site in `callee` with the loop, branch or fusion of the `caller`, an instruction in
    `name`.
    """
    if caller.opcode == "while":
        iterations = trip_count(module, name, caller)
        return site._replace(loops=(iterations, *site.loops), branches=(False, *site.branches))
    if caller.opcode == "conditional":
        return site._replace(branches=(True, *site.branches[1:]))
    # the last two are on a TPU's SparseCore
    if caller.opcode in ("async-start", "call-start", "custom-call-start"):
        return site._replace(asynchronous=True)
    if caller.opcode == "fusion":
        root = root_of(module, callee)
        is_scatter = (
            site.kind == "all-reduce"
            and root.opcode == "dynamic-slice"
            and operands(root)[0] == site.instruction.name
        )
        return site._replace(
            kind="reduce-scatter" if is_scatter else site.kind,
            asynchronous=site.asynchronous or chain_of(site.instruction) is not None,
        )
    return site


def chain_of(instruction: Instruction) -> str | None:
    """Return the id that XLA:TPU writes on all pieces of one collective that it fuses with
    computation.
    """
    match = (
        _CHAIN.search(instruction.arguments)
        if "async_collective_fusion_config" in instruction.arguments
        else None
    )
    return match[1] if match else None


_CHAIN = re.compile(r'chain_id="(\d+)"')


def _is_sync(instruction: Instruction) -> bool:
    """Return whether XLA:GPU's scheduler runs a start and done pair synchronously."""
    config = attributes(instruction).get("backend_config", "")
    try:
        return json.loads(config).get("collective_backend_config", {}).get("is_sync", False)
    except (json.JSONDecodeError, AttributeError):
        return False


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Return the number of iterations of a `while`.

    None if the text does not contain it as a constant.

    XLA:CPU and XLA:GPU write it on the loop. XLA:TPU does not, so it is computed from the loop's
    counter: its start, its increment and the bound of the comparison. A loop that turns once at the
    most counts as one iteration, as a branch counts as taken.
    """
    known = _KNOWN.search(loop.arguments)
    if known:
        return int(known[1])
    try:
        return _counted(module, computation, loop)
    except _UnknownError:
        return None


_KNOWN = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_TRANSPARENT = ("bitcast", "convert", "copy")


class _UnknownError(Exception):
    """A number does not follow from the text."""


def _counted(module: Module, computation: str, loop: Instruction) -> int:
    """Return the number of iterations from the loop's counter."""
    words = attributes(loop)
    condition, body = (_root(module, words[key].lstrip("%")) for key in ("condition", "body"))
    counter, end, upwards = _limit(module, condition)
    initial = _Reference(computation, operands(loop)[0])

    def carried(slot: int) -> list[_Linear]:
        """Return an element of the loop's state before the loop, and after a turn."""
        return [_linear(module, _tuple_element(module, at, slot)) for at in (initial, body)]

    start, step = carried(counter)
    counts_towards_end = step.plus > 0 if upwards else step.plus < 0
    if start.slot is not None or step.slot != counter or not counts_towards_end:
        raise _UnknownError
    if end.slot is None:
        return len(range(start.plus, end.plus, step.plus))
    bound, after = carried(end.slot)
    is_same_end = after == _Linear(end.slot, 0) and bound.slot == AT_MOST
    turns_once = upwards and start.plus < bound.plus + end.plus <= start.plus + step.plus
    if is_same_end and turns_once:
        return 1
    raise _UnknownError


class _Reference(NamedTuple):
    """An instruction by name, and the arguments of its computation (None: its parameter is the
    loop's state).
    """

    computation: str
    name: str
    arguments: "tuple[_Reference, ...] | None" = None


class _Linear(NamedTuple):
    """Element `slot` of the loop's state (None: zero; AT_MOST: zero or less) plus `plus`."""

    slot: int | None
    plus: int


AT_MOST = -1
"""The slot of a number that is known by its upper bound alone."""


def _limit(module: Module, condition: _Reference) -> tuple[int, _Linear, bool]:
    """Return the counter of a loop as an element of its state, the number at which the loop ends,
    and whether it turns below that number, or above.
    """
    comparison, compared = _followed(module, condition)
    if comparison.opcode != "compare":
        raise _UnknownError
    direction = attributes(comparison)["direction"]
    lhs, rhs = (_linear(module, operand) for operand in compared)
    if lhs.slot is None:  # put the counter on the left
        lhs, rhs, direction = rhs, lhs, MIRRORED.get(direction, "")
    if lhs.slot in (None, AT_MOST) or lhs.plus or direction not in MIRRORED:
        raise _UnknownError
    end = rhs._replace(plus=rhs.plus + {"LE": 1, "GE": -1}.get(direction, 0))
    return lhs.slot, end, direction in ("LT", "LE")


def _followed(module: Module, reference: _Reference) -> tuple[Instruction, tuple[_Reference, ...]]:
    """Return the instruction behind copies, calls and their arguments, and its operands."""
    line = _instruction_at(module, reference)
    inputs = tuple(
        _Reference(reference.computation, name, reference.arguments) for name in operands(line)
    )
    if line.opcode in _TRANSPARENT:
        return _followed(module, inputs[0])
    if line.opcode == "parameter" and reference.arguments is not None:
        return _followed(module, reference.arguments[int(inputs[0].name)])
    if line.opcode in ("fusion", "call"):
        root = _root(module, callees(line)[0])
        return _followed(module, root._replace(arguments=inputs))
    return line, inputs


def _linear(module: Module, reference: _Reference) -> _Linear:
    """Evaluate the arithmetic of loop counters: constants, elements of the state and additions."""
    line, inputs = _followed(module, reference)
    if line.opcode == "constant" and re.fullmatch(r"-?\d+", inputs[0].name):
        return _Linear(None, int(inputs[0].name))
    if line.opcode == "get-tuple-element" and _followed(module, inputs[0])[0].opcode == "parameter":
        return _Linear(int(attributes(line)["index"]), 0)
    if line.opcode == "add":
        lhs, rhs = (_linear(module, operand) for operand in inputs)
        if None in (lhs.slot, rhs.slot):
            return _Linear(rhs.slot if lhs.slot is None else lhs.slot, lhs.plus + rhs.plus)
    if line.opcode == "minimum" and (bound := _linear(module, inputs[1])).slot is None:
        return bound._replace(slot=AT_MOST)
    raise _UnknownError


MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _instruction_at(module: Module, reference: _Reference) -> Instruction:
    lines = module.computations[reference.computation]
    return next(line for line in lines if line.name == reference.name)


def _root(module: Module, computation: str) -> _Reference:
    return _Reference(computation, root_of(module, computation).name)


def _tuple_element(module: Module, reference: _Reference, index: int) -> _Reference:
    """Return element `index` of the tuple that an instruction builds."""
    instruction = _instruction_at(module, reference)
    if instruction.opcode != "tuple":
        raise _UnknownError
    return _Reference(reference.computation, operands(instruction)[index])
