"""Donated buffers: a result that takes over the memory of an argument must be computed after the
argument is read for the last time.
"""

from shardopt.hlo._hlo_text import (
    Instruction,
    Module,
    aliases,
    arrays,
    elements,
    entry_parameters,
    operands,
    root_of,
)

_SAME_MEMORY = ("bitcast", "get-tuple-element", "optimization-barrier")


def faults_of_aliases(module: Module) -> list[tuple[Instruction, str]]:
    """Return the instructions that write into a donated argument too early, with the reason."""
    lines = list(module.computations[module.entry])
    root = root_of(module)
    parameters = entry_parameters(module)
    is_scheduled = "is_scheduled=true" in module.header
    places = {line.name: place for place, line in enumerate(lines)}
    taken: set[int] = set()
    faults = []
    for result, number in aliases(module.header):
        if number >= len(parameters) or number in taken:
            faults.append((root, f"it gives argument {number} to a result, and it has none left."))
            continue
        taken.add(number)
        shape = elements(root.shape)[result[0]] if result else root.shape
        if arrays(shape) != arrays(parameters[number].shape):
            faults.append(
                (root, f"a result takes over argument {number}, which has another shape.")
            )
        elif is_scheduled and root.opcode == "tuple" and result:
            writer = lines[places[operands(root)[result[0]]]]
            # Back to the instruction that fills the memory; those between only name it.
            while writer.opcode in _SAME_MEMORY or writer.opcode.endswith("-done"):
                writer = lines[places[operands(writer)[0]]]
            reader = _last_reader(lines, parameters[number])
            if writer.opcode != "parameter" and places[writer.name] < places[reader.name]:
                reason = f"it overwrites argument {number}, which {reader.name} reads later."
                faults.append((writer, reason))
    return faults


def _last_reader(lines: list[Instruction], parameter: Instruction) -> Instruction:
    """Return the last instruction, before the result, that reads an argument."""
    names = {parameter.name}
    reader = parameter
    for line in lines:
        if line.opcode in ("constant", "parameter", "iota") or line.is_root:
            continue
        if names & set(operands(line)):
            if line.opcode in _SAME_MEMORY:
                names.add(line.name)
            reader = line
    return reader
