"""From the entry of a program through loops, branches and calls: every collective with how often it runs."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from shardopt.audit.hlo_text import Instruction, Module, attributes, operands
from shardopt.core.errors import format_error

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@runtime_checkable
class HasTicks(Protocol):
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
      branches: whether it stands in a branch outside of all loops, directly in the first loop, in the second, and so on.
      asynchronous: whether other instructions may run between its start and its end.
    """

    instruction: Instruction
    kind: str
    loops: tuple[int | None, ...] = ()
    branches: tuple[bool, ...] = (False,)
    asynchronous: bool = False

    @property
    def conditional(self) -> bool:
        """Whether it stands in a branch."""
        return any(self.branches)


def collectives_of(module: Module, schedule: HasTicks | None = None) -> Iterator[Found]:
    """Yield the collectives that the entry computation reaches; one reached by two calls comes twice.

    Branches directly in the loop over a schedule's ticks, the outermost one of so many turns, count as often as a stage
    takes them.
    """
    for found in _walk(module, module.entry, with_collectives(module)):
        yield found if schedule is None else _as_scheduled(found, schedule)


def times_taken(turns: int, schedule: HasTicks | None) -> int:
    """Return how often a branch directly in a loop counts: each time, or once per micro-batch and chunk in that of ticks."""
    if schedule is None or turns != schedule.num_ticks:
        return turns
    return schedule.num_micro_batches * schedule.num_chunks


def check_schedule(who: str, module: Module, schedule: HasTicks | None) -> None:
    """Refuse a schedule that is not that of the program."""
    if schedule is None or schedule.num_ticks == 1:  # a loop that turns once is no loop any more
        return
    loops = [
        trip_count(module, name, line)
        for name, lines in module.computations.items()
        for line in lines
        if line.opcode == "while"
    ]
    if schedule.num_ticks in loops:
        return
    known = sorted({count for count in loops if count is not None})
    turns = [*map(str, known), *(["unknown"] if None in loops else [])]
    there = f"its loops turn {', '.join(turns)} times" if loops else "it has no loop"
    what = f"the schedule has {schedule.num_ticks} ticks, and no loop of the program turns so often: {there}."
    fix = "pass the schedule that the program was made with, such as opt.config.schedule, or none."
    raise ValueError(format_error(who, what, fix=fix))


def _as_scheduled(found: Found, schedule: HasTicks) -> Found:
    if schedule.num_ticks not in found.loops:
        return found
    at = found.loops.index(schedule.num_ticks)
    if not found.branches[at + 1]:
        return found
    taken = times_taken(schedule.num_ticks, schedule)
    return found._replace(loops=(*found.loops[:at], taken, *found.loops[at + 1 :]))


def _walk(module: Module, name: str, busy: set[str]) -> Iterator[Found]:
    chains: set[str] = set()
    for instruction in module.computations.get(name, ()):
        for found in collectives_under(module, name, instruction, busy):
            # XLA:TPU spreads a collective over several fusions, each with a copy of the instruction
            chain = chain_of(found.instruction)
            if chain is None or chain not in chains:
                yield found
            chains |= {chain} if chain else set()


def collectives_under(module: Module, name: str, instruction: Instruction, busy: set[str]) -> Iterator[Found]:
    """Yield the collective that an instruction of computation `name` is, or those that it runs."""
    if kind := kind_of(instruction):
        started = instruction.opcode.endswith("-start") and not _is_sync(instruction)
        yield Found(instruction, kind, asynchronous=started or crosses_slices(instruction))
        return
    for callee in callees(instruction):
        if callee in busy:
            for found in _walk(module, callee, busy):
                yield _from_outside(module, name, instruction, callee, found)


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


def with_collectives(module: Module) -> set[str]:
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
        turns = trip_count(module, name, caller)
        return found._replace(loops=(turns, *found.loops), branches=(False, *found.branches))
    if caller.opcode == "conditional":
        return found._replace(branches=(True, *found.branches[1:]))
    if caller.opcode in ("async-start", "call-start", "custom-call-start"):  # the latter two on a TPU's SparseCore
        return found._replace(asynchronous=True)
    if caller.opcode == "fusion":
        is_scatter = found.kind == "all-reduce" and _returns_a_slice(module, callee, found.instruction)
        return found._replace(
            kind="reduce-scatter" if is_scatter else found.kind,
            asynchronous=found.asynchronous or chain_of(found.instruction) is not None,
        )
    return found


def _returns_a_slice(module: Module, name: str, instruction: Instruction) -> bool:
    return any(
        line.is_root and line.opcode == "dynamic-slice" and operands(line)[0] == instruction.name
        for line in module.computations[name]
    )


def chain_of(instruction: Instruction) -> str | None:
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


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Return how often a `while` of a computation turns, or None if that is not a constant that can be read off.

    XLA:CPU and XLA:GPU note it on the loop. XLA:TPU does not, so the counter is followed: where it starts, what
    is added in a turn, and what it is compared with. A loop named `ONE_TURN` hides it from XLA.
    """
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    if _NAMED.search(loop.rest):
        return 1
    words = attributes(loop)
    condition, body = (words.get(key, "").lstrip("%") for key in ("condition", "body"))
    test = _value(module, _root(module, condition))
    if not isinstance(test, _Compare) or test.left.slot is None or test.left.plus or test.right.slot is not None:
        return None
    counter = test.left.slot
    start = _value(module, _member(module, _Name(computation, operands(loop)[0]), counter))
    change = _value(module, _member(module, _root(module, body), counter))
    if not isinstance(start, _Linear) or start.slot is not None:
        return None
    if not isinstance(change, _Linear) or change.slot != counter or change.plus == 0:
        return None
    end = test.right.plus + {"LE": 1, "GE": -1}.get(test.direction, 0)
    upwards = test.direction in ("LT", "LE")
    return len(range(start.plus, end, change.plus)) if upwards == (change.plus > 0) else None


ONE_TURN = "one_turn"
"""The `jax.named_scope` of a loop that turns once, and of which XLA is not to know it, or it would dissolve it."""
_NAMED = re.compile(rf'op_name="[^"]*/{ONE_TURN}/while"')
_KNOWN = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_TRANSPARENT = ("bitcast", "convert", "copy")


class _Name(NamedTuple):
    """An instruction, and what the parameters of its computation stand for (None: they are the loop's state)."""

    computation: str
    name: str
    arguments: "tuple[_Name, ...] | None" = None


class _Linear(NamedTuple):
    """An element of the loop's state, if any, plus a constant."""

    slot: int | None
    plus: int


class _Compare(NamedTuple):
    direction: str
    left: _Linear
    right: _Linear


def _value(module: Module, where: _Name | None) -> _Linear | _Compare | None:
    """Evaluate the little arithmetic that loop counters are made of; None for everything else."""
    instruction = _find(module, where)
    if where is None or instruction is None:
        return None
    opcode, literal = instruction.opcode, instruction.rest.partition(")")[0]
    if opcode == "constant":
        return _Linear(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
    if opcode == "parameter":
        return _value(module, where.arguments[int(literal)]) if where.arguments else None
    inputs = tuple(_Name(where.computation, name, where.arguments) for name in operands(instruction))
    if opcode in _TRANSPARENT:
        return _value(module, inputs[0])
    words = attributes(instruction)
    if opcode in ("fusion", "call"):
        root = _root(module, words.get("calls", words.get("to_apply", "")).lstrip("%"))
        return _value(module, root and root._replace(arguments=inputs))
    if opcode == "get-tuple-element":
        of = _find(module, inputs[0])
        is_state = of is not None and of.opcode == "parameter" and where.arguments is None
        return _Linear(int(words["index"]), 0) if is_state else None
    if opcode not in ("add", "compare"):
        return None
    left, right = (_value(module, one) for one in inputs)
    if not isinstance(left, _Linear) or not isinstance(right, _Linear):
        return None
    if right.slot is not None:  # the counter to the left
        left, right = right, left
        words = {"direction": _MIRRORED.get(words.get("direction", ""), "")}
    if right.slot is not None:
        return None
    if opcode == "add":
        return _Linear(left.slot, left.plus + right.plus)
    return _Compare(words["direction"], left, right) if words["direction"] in _MIRRORED else None


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _find(module: Module, where: _Name | None) -> Instruction | None:
    lines = module.computations.get(where.computation, ()) if where else ()
    return next((line for line in lines if where and line.name == where.name), None)


def _root(module: Module, computation: str) -> _Name | None:
    lines = module.computations.get(computation, ())
    return next((_Name(computation, line.name) for line in lines if line.is_root), None)


def _member(module: Module, where: _Name | None, index: int) -> _Name | None:
    """Return what stands at a place in the tuple that an instruction makes."""
    made = _find(module, where)
    if where is None or made is None or made.opcode != "tuple":
        return None
    return _Name(where.computation, operands(made)[index])
