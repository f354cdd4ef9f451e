"""Parse HLO text into computations and instructions, with only the structure that an audit needs."""

import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from shardopt.core import format_error

cached = functools.lru_cache(maxsize=2**12)
"""A cache of the last results of a function. It is bounded, so that a process may prove many
programs.
"""


class Instruction(NamedTuple):
    """One line of HLO: `name = shape opcode(operands), attributes`.

    Attributes:
      name: name without the percent sign.
      shape: shape of the result as text, `f32[8,4]{1,0}` or a tuple in parentheses.
      opcode: `all-reduce`, `while`, ...
      arguments: the text after the opcode's opening parenthesis; `operands` and `attributes` parse it.
      is_root: whether it is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    is_root: bool


class Module(NamedTuple):
    """A parsed program: its header line, the name of its entry computation, and all computations by
    name.
    """

    header: str
    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all computations, in the order of the text."""
        return [line for lines in self.computations.values() for line in lines]


def parse(text: str) -> Module:
    """Parse the text of an optimised or unoptimised HLO module."""
    header = ""
    entry = ""
    name = None
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if line.startswith("HloModule"):
            if header:
                raise _not_a_module("it has two HloModule lines")
            header = line
        elif name is None:
            opening = _OPENING.match(line)
            if opening:
                name = opening["name"]
                computations[name] = []
                entry = name if opening["entry"] else entry
        elif _CLOSING.match(line):
            name = None
        elif instruction := _instruction(line):
            computations[name].append(instruction)
        elif computations[name] and line.strip():  # metadata of kernels spans several lines
            previous = computations[name][-1]
            computations[name][-1] = previous._replace(arguments=previous.arguments + line)
    if not header:
        raise _not_a_module("it has no HloModule line")
    if not entry:
        raise _not_a_module("it has no entry computation")
    if name is not None:
        raise _not_a_module(f"it ends within computation {name}")
    return Module(header, entry, {key: tuple(lines) for key, lines in computations.items()})


def _not_a_module(reason: str) -> ValueError:
    problem = f"this is not the text of an HLO module: {reason}."
    fix = "pass compiled.as_text(), or the compiled program itself."
    return ValueError(format_error("audit", problem, fix=fix))


def sizes_of_program(module: Module) -> tuple[int, int]:
    """Return the number of replicas, and of partitions of each; 1 if the first line does not say."""
    replicas, partitions = (
        re.search(rf"\b{attribute}=(\d+)", module.header)
        for attribute in ("replica_count", "num_partitions")
    )
    return int(replicas[1]) if replicas else 1, int(partitions[1]) if partitions else 1


def aliases(header: str) -> list[tuple[tuple[int, ...], int]]:
    """Return the results that take over the memory of arguments: the place of a result in the
    tuple, and the number of the argument.
    """
    listed = header.partition("input_output_alias={")[2].partition(" }")[0]
    return [(numbers(place), int(number)) for place, number in _ALIAS.findall(listed)]


def operands(instruction: Instruction) -> list[str]:
    """Return the operand names. For a constant or parameter, return its literal."""
    operand_text = TUPLE_INDEX.sub("", instruction.arguments[: end_of(instruction.arguments)])
    # an operand may carry its shape: `f32[8]{0} %x`
    return [part.split()[-1].lstrip("%") for part in split(operand_text) if part.strip()]


def entry_parameters(module: Module) -> list[Instruction]:
    """Return the parameters of the entry computation, in order."""
    lines = [line for line in module.computations[module.entry] if line.opcode == "parameter"]
    return sorted(lines, key=lambda line: int(operands(line)[0]))


def root_of(module: Module, computation: str = "") -> Instruction:
    """Return the instruction that is the result of a computation, by default of the entry."""
    lines = module.computations[computation or module.entry]
    return next((line for line in lines if line.is_root), lines[-1])


def attributes(instruction: Instruction) -> dict[str, str]:
    """Return the attributes after the operands as text, `{"channel_id": "1", ...}`."""
    values: dict[str, str] = {}
    previous_key = ""
    for part in split(instruction.arguments[end_of(instruction.arguments) + 1 :]):
        key, equals, value = part.strip().partition("=")
        if not equals:
            continue
        if key == "device_ids" and values.get(previous_key, "").startswith("mesh["):
            values[previous_key] += (
                # `replica_groups=mesh['a'=2], device_ids=(1,0) {'a'}` is one attribute
                f", {part.strip()}"
            )
            continue
        values[key], previous_key = value, key
    return values


@cached
def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a text."""
    return tuple(map(int, re.findall(r"-?\d+", text)))


class WindowDim(NamedTuple):
    """One dim of the window of a convolution or reduction.

    Attributes:
      size: the number of elements.
      stride: the step of the window.
      low: the padding before the first element.
      high: the padding behind the last element.
      spread: the step between elements of the operand.
      dilation: the step between elements of the window.
      reverse: whether the window is read backwards.
    """

    size: int
    stride: int
    low: int
    high: int
    spread: int
    dilation: int
    reverse: int


_WINDOW = {
    "size": (1,),
    "stride": (1,),
    "pad": (0, 0),
    "lhs_dilate": (1,),
    "rhs_dilate": (1,),
    "rhs_reversal": (0,),
}
"""The parts of a window, with their defaults."""


def window_dims(attributes: Mapping[str, str]) -> list[WindowDim]:
    """Return each dim of `window={size=2x2 pad=0_1x0_1}`; none if there is no window."""
    words = attributes.get("window", "").strip("{}").split()
    parts = {key: text.split("x") for key, text in (word.split("=") for word in words)}
    return [
        WindowDim(
            *(
                number
                for key, default in _WINDOW.items()
                for number in (numbers(parts[key][dim]) if key in parts else default)
            )
        )
        for dim in range(len(parts.get("size", ())))
    ]


def split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets and quotes."""
    parts = []
    start = 0
    depth = 0
    for token in _PUNCTUATION.finditer(text):
        character = token[0]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


_OPENING = re.compile(r"^\s*(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(\(.*)?\{\s*$")
_CLOSING = re.compile(r'^\s*\}\s*(?:,\s*execution_thread="[^"]*")?\s*(?://.*)?$')
"""This does not match every line that begins with a brace, because metadata of kernels has such
lines.
"""
_ASSIGNMENT = re.compile(r"^\s*(?P<root>ROOT\s+)?%?(?P<name>[^\s=]+) = (?P<definition>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_PUNCTUATION = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+),")
TUPLE_INDEX = re.compile(r"/\*index=\d+\*/")


def _instruction(line: str) -> Instruction | None:
    assignment = _ASSIGNMENT.match(line)
    if not assignment:
        return None
    definition = assignment["definition"]
    end = end_of(definition[1:]) + 2 if definition.startswith("(") else definition.find(" ")
    opcode = _OPCODE.match(definition, end)
    if not opcode:
        return None
    shape = TUPLE_INDEX.sub("", definition[:end])
    return Instruction(
        assignment["name"],
        shape,
        opcode["opcode"],
        definition[opcode.end() :],
        bool(assignment["root"]),
    )


def end_of(text: str) -> int:
    """Return the index of the bracket that closes the one just before `text`."""
    depth = 1
    for token in _BRACKETS.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth == 0:
                return token.start()
    return len(text)


@cached
def elements(shape: str) -> tuple[str, ...]:
    """Return the elements of a tuple shape, one level deep.

    For an array, return the array alone.
    """
    shape = shape.strip()
    if not shape.startswith("("):
        return (shape,)
    return tuple(part.strip() for part in split(shape[1:-1]) if part.strip())


def arrays(shape: str) -> list[str]:
    """Return all arrays of a shape, also in nested tuples, without their layouts: `["f32[8,4]",
    ...]`.
    """
    if shape.strip().startswith("("):
        return [array for part in elements(shape) for array in arrays(part)]
    return [shape.split("{")[0].strip()]


@cached
def array_shape(shape: str) -> tuple[int, ...]:
    """Return the dims of an array shape as text."""
    return numbers(arrays(shape)[0].partition("[")[2])


def nbytes(shape: str) -> int:
    """Return the bytes of an array or tuple shape without padding.

    Each array is rounded up to whole bytes.

    Tokens have 0 bytes. A bounded dynamic dim (`<=8`) counts as its bound.

    Example:
      >>> nbytes("(bf16[8,4]{1,0:T(8,128)(2,1)}, s4[3]{0:E(4)}, pred[])")
      67
    """
    return sum(map(_array_bytes, arrays(shape)))


def tiled_nbytes(shape: str) -> int:
    """Return the bytes of an array or tuple shape in its layout: XLA:TPU pads dims to whole tiles.

    Example:
      >>> tiled_nbytes("f32[100,12]{0,1:T(8,128)}") == 16 * 128 * 4
      True
    """
    if shape.strip().startswith("("):
        return sum(map(tiled_nbytes, elements(shape)))
    match = _TILED.match(shape.strip())
    if not match:
        return nbytes(shape)
    dims = numbers(match["dims"])
    order = numbers(match["order"])
    tile = numbers(match["tile"])
    # HLO writes the order of memory with the fastest dim first.
    major_to_minor = [dims[dim_index] for dim_index in reversed(order)]
    tiles = [1] * (len(dims) - len(tile)) + list(tile)
    physical = [1] * (len(tile) - len(dims)) + major_to_minor
    # Tiles cover the last dims in the order of memory, and each of these dims is rounded up.
    padded = [-(-dim // size) * size for dim, size in zip(physical, tiles, strict=True)]
    return -(-math.prod(padded) * _bits(match["dtype"]) // 8)


_TILED = re.compile(
    r"^(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]\{(?P<order>[\d,]*):T\((?P<tile>[\d,]+)\)"
)
_ARRAY = re.compile(r"^(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]$")
_BITS = re.compile(r"^(?:bf|f|s|u|c)(\d+)")


def _array_bytes(array: str) -> int:
    match = _ARRAY.match(array)
    if not match:
        raise ValueError(f"audit: cannot read the HLO shape {array!r}.")
    return -(-math.prod(numbers(match["dims"])) * _bits(match["dtype"]) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    match = _BITS.match(dtype)  # f8e4m3fn, bf16, s4, c64: the number that follows the letters
    if not match:
        raise ValueError(f"audit: unknown HLO element type {dtype!r}.")
    return int(match[1])
