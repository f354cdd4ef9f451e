"""The first wrong instruction, with its place in the program of the user and the instructions
around it.
"""

from collections.abc import Mapping, Sequence

from shardopt.hlo._collective import axes_of_groups
from shardopt.hlo._hlo_text import Instruction, Module, operands
from shardopt.hlo._source_lines import op_name_of, read_frames, source_of
from shardopt.hlo.proof._proof import WrongInstruction
from shardopt.hlo.proof._value import Fault

MAX_LINES = 58
MAX_WIDTH = 200


def describe(
    fault: Fault,
    module: Module,
    instructions: Sequence[Instruction],
    text: str,
    sizes: Mapping[str, int],
) -> WrongInstruction:
    """Return the report of a fault.

    `sizes` has mesh axis -> size, and is empty if the mesh is unknown.
    """
    instruction = instructions[fault.order]
    source = source_of(instruction, read_frames(text)) or op_name_of(instruction)
    axes = axes_of_groups(fault.groups, sizes) if sizes and fault.groups else None
    hlo = _around(instruction, module)
    return WrongInstruction(
        instruction.name, instruction.opcode, source, axes, fault.groups, fault.reason, hlo
    )


def _around(instruction: Instruction, module: Module) -> str:
    """Return the instruction, the instructions that it reads over three steps, and its readers, in
    the order of the program.
    """
    name, lines = next(
        (name, lines)
        for name, lines in module.computations.items()
        if any(line is instruction for line in lines)
    )
    by_name = {line.name: line for line in lines}
    edge = {instruction.name}
    shown = set(edge)
    for _ in range(3):
        read = {
            operand
            for line in map(by_name.__getitem__, edge)
            if line.opcode not in ("constant", "parameter")
            for operand in operands(line)
        }
        edge = read & by_name.keys() - shown
        shown |= edge
    shown |= {line.name for line in lines if instruction.name in operands(line)}
    near = [line for line in lines if line.name in shown]
    centre = near.index(instruction)
    start = max(0, min(centre - MAX_LINES // 2, len(near) - MAX_LINES))
    texts = [_text(line, mark=line is instruction) for line in near[start : start + MAX_LINES]]
    return "\n".join([f"{name}:", *texts])


def _text(line: Instruction, *, mark: bool) -> str:
    arguments = line.arguments.split(", metadata=")[0].split(", backend_config=")[0]
    text = f"{'> ' if mark else '  '}{line.name} = {line.shape} {line.opcode}({arguments}"
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."
