"""The instructions of a module with their shapes, operands and attributes parsed once."""

import functools
import re
from typing import NamedTuple

from shardopt.hlo._hlo_text import Instruction, Module, arrays, attributes, elements, operands

Groups = tuple[tuple[int, ...], ...]


class Line(NamedTuple):
    """One instruction.

    Attributes:
      name: its name.
      opcode: its opcode.
      shape: its shape as text.
      operands: the names of its operands; the literal of a constant or parameter.
      attributes: its attributes as text.
      order: its index in the text of the module.
      is_root: whether it is the result of its computation.
      rest: the text after the opcode.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    order: int
    is_root: bool
    rest: str

    def __hash__(self) -> int:
        return self.order

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an attribute such as `dimensions={0,2}`."""
        return numbers(self.attributes.get(key, ""))

    @property
    def dims(self) -> tuple[int, ...]:
        """The local shape of the result, an array."""
        return array_shape(self.shape)

    @property
    def bounds(self) -> tuple[tuple[int, int, int], ...]:
        """The (start, stop, stride) of each dim of a slice."""
        parts = [numbers(part) for part in self.attributes["slice"].split("]")]
        return tuple((part[0], part[1], part[2] if len(part) == 3 else 1) for part in parts if part)

    @property
    def callee(self) -> str:
        """The computation that it calls or reduces with."""
        return self.attributes.get("calls", self.attributes.get("to_apply", "")).strip("{}% ")


def read_lines(module: Module) -> tuple[dict[str, tuple[Line, ...]], list[Instruction]]:
    """Return the lines of every computation, and all instructions by their order."""
    computations, flat = {}, []
    for name, instructions in module.computations.items():
        lines = []
        for instruction in instructions:
            literal = instruction.opcode in ("constant", "parameter", "iota")
            names = () if literal else tuple(operands(instruction))
            lines.append(
                Line(
                    instruction.name,
                    instruction.opcode,
                    instruction.shape,
                    names,
                    attributes(instruction),
                    len(flat),
                    instruction.is_root,
                    instruction.rest,
                )
            )
            flat.append(instruction)
        computations[name] = tuple(lines)
    return computations, flat


@functools.cache
def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a text."""
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


@functools.cache
def array_shape(shape: str) -> tuple[int, ...]:
    """Return the dims of an array shape as text."""
    first = arrays(shape)[0]
    return numbers(first[first.index("[") :]) if "[" in first else ()


@functools.cache
def dtype_of(shape: str) -> str:
    """Return the element type of an array shape as text."""
    return arrays(shape)[0].split("[")[0]


@functools.cache
def major_to_minor(shape: str) -> tuple[int, ...]:
    """Return the order of the dims in memory, major first."""
    match = re.match(r"^\w+\[[^\]]*\]\{([\d,]*)", elements(shape)[0])
    return tuple(reversed(numbers(match[1]))) if match else tuple(range(len(array_shape(shape))))


@functools.cache
def leaves(shape: str) -> tuple[str, ...]:
    """Return the element shapes of a tuple, with layouts; one level deep."""
    return tuple(elements(shape))
