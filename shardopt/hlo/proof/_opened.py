"""Asynchronous instructions as synchronous ones. Both witnesses read a program in this form.

`K-start`, `K-update` and `K-done` are one instruction `K`, whatever `K` is: a collective, a copy, a
slice or a call. A start or an update brings operands, and the instruction runs at the last of them.
"""

from collections.abc import Sequence

from shardopt.hlo._hlo_text import Instruction, Module, elements, end_of, operands
from shardopt.hlo._walk import ON_SPARSE_CORE

THROUGH = "optimization-barrier"
"""The opcode of what hands a value on."""


def opened(module: Module) -> Module:
    """Return the module without asynchronous instructions.

    Each instruction keeps its name and its place.
    """
    return module._replace(
        computations={name: _opened(lines) for name, lines in module.computations.items()}
    )


def _opened(lines: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    start_of: dict[str, str] = {}
    chains: dict[str, list[Instruction]] = {}
    for line in lines:
        kind, _, part = line.opcode.rpartition("-")
        if not kind or part not in ("start", "update", "done"):
            continue
        start = line.name if part == "start" else start_of.get(operands(line)[0], line.name)
        start_of[line.name] = start
        chains.setdefault(start, []).append(line)
    changed = {line.name: line for chain in chains.values() for line in _synchronous(chain)}
    return tuple(changed.get(line.name, line) for line in lines) if changed else lines


def _synchronous(chain: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions of a chain: nothing, then the instruction with all operands, then its
    value.
    """
    start, *later = chain
    # its start is in another computation, such as the turn of a loop before
    if not start.opcode.endswith("-start"):
        return [line._replace(opcode=THROUGH, arguments=f"%{operands(line)[0]})") for line in chain]
    added = [operands(start), *(operands(line)[1:] for line in later)]
    last = max((i for i, names in enumerate(added) if names), default=0)
    values = ", ".join(f"%{name}" for names in added for name in names)
    kind = start.opcode.removesuffix("-start")
    # `elements(shape)[0]` of the update or the start are operands
    shape = (
        chain[-1].shape
        if chain[-1].opcode.endswith("-done")
        else _result_shape(kind, chain[last].shape)
    )
    attributes = start.arguments[end_of(start.arguments) + 1 :]
    if kind == "async" or (kind == "custom-call" and ON_SPARSE_CORE in attributes):
        kind = "call"
        attributes = attributes.replace("called_computations=", "to_apply=")
    lines = [line._replace(opcode="after-all", shape="()", arguments=")") for line in chain[:last]]
    lines.append(chain[last]._replace(opcode=kind, shape=shape, arguments=f"{values}){attributes}"))
    passed = f"%{chain[last].name})"
    return lines + [
        line._replace(opcode=THROUGH, shape=shape, arguments=passed) for line in chain[last + 1 :]
    ]


def _result_shape(kind: str, shape: str) -> str:
    # other starts have a tuple: operands, results and contexts
    if kind == "all-reduce" or not shape.startswith("("):
        return shape
    return elements(shape)[0 if kind == "copy" else 1]
