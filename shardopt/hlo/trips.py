"""How often a while loop runs: what XLA wrote down, or what its counter says."""

import re
from typing import NamedTuple

from shardopt.hlo.text import Instruction, Module, attributes, operands


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Return how often a loop runs, or None if that is not a constant that can be read off.

    XLA:CPU and XLA:GPU note it on the loop. XLA:TPU does not, so the counter is followed: where it starts, what
    is added in a turn, and what it is compared with.

    Args:
      module: the program.
      computation: the name of the computation that the loop stands in.
      loop: the `while` instruction.
    """
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    words = attributes(loop)
    condition, body = (words.get(key, "").lstrip("%") for key in ("condition", "body"))
    test = _value(module, _root(module, condition))
    if not isinstance(test, _Compare) or not isinstance(test.left, _Element) or not isinstance(test.right, int):
        return None
    counter = test.left.slot
    start = _value(module, _member(module, _Name(computation, operands(loop)[0]), counter))
    change = _value(module, _member(module, _root(module, body), counter))
    if not isinstance(start, int) or not isinstance(change, _Step) or change.slot != counter or change.step == 0:
        return None
    end = test.right + {"LE": 1, "GE": -1}.get(test.direction, 0)
    upwards = test.direction in ("LT", "LE")
    return len(range(start, end, change.step)) if upwards == (change.step > 0) else None


_KNOWN = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_TRANSPARENT = ("bitcast", "convert", "copy")


class _Name(NamedTuple):
    """An instruction, and what the parameters of its computation stand for (None: they are the loop's state)."""

    computation: str
    name: str
    arguments: "tuple[_Name, ...] | None" = None


class _Element(NamedTuple):
    """An element of the loop's state."""

    slot: int


class _Step(NamedTuple):
    """An element of the loop's state plus a constant."""

    slot: int
    step: int


class _Compare(NamedTuple):
    direction: str
    left: "_Value"
    right: "_Value"


_Value = int | _Element | _Step | _Compare | None


def _value(module: Module, where: _Name | None) -> _Value:
    """Evaluate the little arithmetic that loop counters are made of; None for everything else."""
    instruction = _find(module, where)
    if where is None or instruction is None:
        return None
    opcode = instruction.opcode
    if opcode == "constant":
        literal = instruction.rest.partition(")")[0]
        return int(literal) if re.fullmatch(r"-?\d+", literal) else None
    if opcode == "parameter":
        number = int(instruction.rest.partition(")")[0])
        return _value(module, where.arguments[number]) if where.arguments else None
    inputs = tuple(_Name(where.computation, name, where.arguments) for name in operands(instruction))
    if opcode in _TRANSPARENT:
        return _value(module, inputs[0])
    if opcode in ("fusion", "call"):
        words = attributes(instruction)
        callee = words.get("calls", words.get("to_apply", "")).lstrip("%")
        root = _root(module, callee)
        return _value(module, root and root._replace(arguments=inputs))
    if opcode == "get-tuple-element":
        of = _find(module, inputs[0])
        is_state = of is not None and of.opcode == "parameter" and where.arguments is None
        return _Element(int(attributes(instruction)["index"])) if is_state else None
    if opcode == "add":
        return _add(_value(module, inputs[0]), _value(module, inputs[1]))
    if opcode == "compare":
        return _compare(attributes(instruction)["direction"], _value(module, inputs[0]), _value(module, inputs[1]))
    return None


def _add(left: _Value, right: _Value) -> _Value:
    if isinstance(left, int):
        left, right = right, left
    return _Step(left.slot, right) if isinstance(left, _Element) and isinstance(right, int) else None


def _compare(direction: str, left: _Value, right: _Value) -> _Value:
    if isinstance(left, int):
        mirrored = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}
        left, right, direction = right, left, mirrored.get(direction, direction)
    return _Compare(direction, left, right) if direction in ("LT", "LE", "GT", "GE") else None


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
