"""Arguments that reach every difference: whole numbers up to the size of the dim that they index,
and around the constants that they are compared with.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shardopt.hlo._hlo_text import Instruction, Module, array_shape
from shardopt.hlo._source_lines import op_name_of
from shardopt.hlo._walk import branches_of
from shardopt.hlo.proof._lines import Line, lines_of, read_shape

SCALES = (1.0, 0.05, 4.0)
"""Arguments are drawn at least so often, each time with numbers of this size: clipping takes both
of its branches, and functions are read outside of [-1, 1].
"""
STEERED = (40.0, 1e-3, 400.0, 1e-5, np.nan)
"""Further sizes, drawn while a branch is not taken. The last makes parameters and batches NaN: some
choices keep what is finite.
"""
MOST_DRAWS = 10
FEW = 8
"""Whole numbers of a batch are below this if nothing is indexed by them."""
_INDEXED_DIMS = {"gather": "start_index_map", "scatter": "scatter_dims_to_operand_dims"}
"""The dims that operand 1 indexes."""
_FIRST_INDEX = {"dynamic-slice": 1, "dynamic-update-slice": 2}
_COMPARED = ("compare", "minimum", "maximum", "clamp", "remainder", "subtract")
_COPIES = ("broadcast", "convert", "copy")
_ENDS = ("dot", "reduce", "rng-bit-generator", "sort", "convolution")


class Reached(NamedTuple):
    """The sizes and constants that a whole number of the arguments reaches.

    Attributes:
      sizes: the sizes of the dims that it indexes.
      constants: the constants that it is compared with.
    """

    sizes: set[int]
    constants: set[int]

    def draw(
        self, name: str, shape: tuple[int, ...], draw: int, source: np.random.Generator
    ) -> np.ndarray:
        """Return numbers for a draw."""
        if "batch" not in name and not shape:
            return np.array(self.counts[draw % len(self.counts)])
        size = min(self.sizes, default=FEW)
        if "batch" not in name and not self.sizes:
            return source.integers(1, 3, shape)
        values = source.integers(0, size, shape)
        inside = [number for number in sorted(self.constants) if -size <= number < size]
        # A special id, such as padding, would be drawn too seldom, so a fifth of the numbers are
        # such.
        if inside and draw == 1:
            return np.where(source.random(shape) < 0.2, source.choice(inside, shape), values)
        return values

    @property
    def counts(self) -> list[int]:
        """The values that a counter takes, one in each draw."""
        near = {constant + step for constant in self.constants for step in (-1, 0, 1)}
        return sorted({1, 2, *(number for number in near if 0 <= number < 2**31)})


class Arguments:
    """The arguments of a program, drawn.

    Attributes:
      parameters: of its entry computation.
      reached: the sizes and constants that each parameter of whole numbers reaches.
    """

    def __init__(self, module: Module, parameters: list[Instruction]) -> None:
        walk = _Walk({name: lines_of(lines) for name, lines in module.computations.items()})
        self.parameters = parameters
        self.reached = {
            line.name: walk.reached(module.entry, line.name)
            for line in parameters
            if read_shape(line.shape).dtype.kind in "ib"
        }

    @property
    def num_draws(self) -> int:
        """The number of draws."""
        counters = [
            len(self.reached[line.name].counts)
            for line in self.parameters
            if line.name in self.reached and not array_shape(line.shape)
        ]
        return min(MOST_DRAWS, max([len(SCALES), *counters]))

    def draw(self, draw: int) -> Iterator[np.ndarray]:
        """Yield whole arguments: moments are positive, keys any bits."""
        source = np.random.default_rng(1 + draw)
        extra = draw - self.num_draws
        scale = SCALES[draw % len(SCALES)] if extra < 0 else STEERED[extra]
        for line in self.parameters:
            shape = read_shape(line.shape)
            name = op_name_of(line)
            if shape.dtype.kind == "u":
                limit = 2**31 if shape.dtype == np.uint32 else FEW
                value = source.integers(0, limit, shape.dims)
            elif line.name in self.reached:
                value = self.reached[line.name].draw(name, shape.dims, draw, source)
            # A negative second moment has no real root.
            elif "opt_state" in name or "weights" in name:
                value = source.uniform(0.1, 1, shape.dims)
            else:
                value = source.uniform(-1, 1, shape.dims) * scale
            yield np.asarray(value).astype(shape.dtype)


Place = tuple[str, str, int]
"""A computation, an instruction in it, and an element of its result; -1 is all of it."""


class _Walk:
    """Follows a value forwards through the computations of a program."""

    def __init__(self, computations: dict[str, tuple[Line, ...]]) -> None:
        self.lines = {
            name: {line.name: line for line in lines} for name, lines in computations.items()
        }
        self.users: dict[tuple[str, str], list[tuple[Line, int]]] = {}
        self.callers: dict[str, list[tuple[str, Line]]] = {}
        for name, lines in computations.items():
            for line in lines:
                for position, operand in enumerate(line.operands):
                    self.users.setdefault((name, operand), []).append((line, position))
                for callee in _called(line):
                    self.callers.setdefault(callee, []).append((name, line))

    def reached(self, computation: str, name: str) -> Reached:
        """Return the sizes and constants that a value reaches."""
        reached = Reached(set(), set())
        waiting: list[Place] = [(computation, name, -1)]
        visited = set(waiting)
        while waiting:
            place = waiting.pop()
            for line, position in self.users.get(place[:2], ()):
                self._add(reached, place[0], line, position)
            new = set(self._next(place)) - visited
            visited |= new
            waiting += new
        return reached

    def _add(self, reached: Reached, computation: str, line: Line, position: int) -> None:
        if line.opcode in _INDEXED_DIMS:
            if position == 1:
                dims = line.operand(0).dims
                indexed = line.integers(_INDEXED_DIMS[line.opcode])
                reached.sizes.update(dims[dim] for dim in indexed)
        elif line.opcode in _FIRST_INDEX:
            dim = position - _FIRST_INDEX[line.opcode]
            if dim >= 0:
                reached.sizes.add(line.operand(0).dims[dim])
        elif line.opcode in _COMPARED:
            for operand in line.operands[:position] + line.operands[position + 1 :]:
                source = _before(self.lines[computation], operand, (*_COPIES, "reshape"))
                if source.opcode == "iota":
                    reached.sizes.add(source.dims[source.integers("iota_dimension")[0]])
                whole_digits = source.literal.lstrip("-").partition(".")[0]
                if source.opcode == "constant" and whole_digits.isdigit():
                    reached.constants.add(int(float(source.literal)))

    def _next(self, place: Place) -> Iterator[Place]:
        computation, name, index = place
        for line, position in self.users.get((computation, name), ()):
            if _called(line):
                yield from self._parameters(line, position, index)
            elif line.opcode in _ENDS:
                continue
            elif line.opcode == "tuple":
                yield computation, line.name, position
            elif line.opcode != "get-tuple-element":
                yield computation, line.name, index
            elif index in (-1, int(line.attributes["index"])):
                yield computation, line.name, -1
        if not self.lines[computation][name].is_root:
            return
        for caller, call in self.callers.get(computation, ()):
            if call.opcode != "while":
                yield caller, call.name, index
            elif call.attributes["body"].strip("%") == computation:
                yield caller, call.name, index
                yield from self._parameters(call, 0, index)  # of the next turn

    def _parameters(self, call: Line, position: int, index: int) -> Iterator[Place]:
        """Yield the parameters that get an operand of a call, loop or conditional."""
        computations = _called(call)
        if call.opcode == "conditional":  # a branch has one operand, after the index
            computations = computations[position - 1 : position]
            position = 0
        for callee in computations:
            for line in self.lines[callee].values():
                if line.opcode == "parameter" and line.literal == str(position):
                    yield callee, line.name, index


def _called(line: Line) -> list[str]:
    """Return the computations whose parameters are operands of a line."""
    if line.opcode in ("call", "fusion"):
        return [line.callee]
    if line.opcode == "while":
        return [line.attributes[key].strip("%") for key in ("condition", "body")]
    return branches_of(line.attributes) if line.opcode == "conditional" else []


def _before(lines: Mapping[str, Line], name: str, opcodes: Collection[str]) -> Line:
    """Return the line that a line follows from through some opcodes of one operand."""
    line = lines[name]
    while line.opcode in opcodes:
        line = lines[line.operands[0]]
    return line


def _is_of_an_index(predicate: Line, lines: dict[str, Line]) -> bool:
    """Return whether a predicate tells an index that counts from the end."""
    if predicate.attributes.get("direction") != "LT":
        return False
    zero = lines[predicate.operands[1]]
    return zero.shape[0] in "su" and zero.opcode == "constant" and zero.literal == "0"


class Sides:
    """Which sides of the choices of a program its runs took.

    A choice is a select or a conditional that one number decides. A select whose predicate is an
    array takes both sides within one run, or guards against numbers that no draw has.
    """

    def __init__(self, module: Module) -> None:
        self.taken: dict[tuple[str, str], set[int]] = {}
        for name, instructions in module.computations.items():
            lines = {line.name: line for line in lines_of(instructions)}
            for line in lines.values():
                if line.opcode not in ("select", "conditional"):
                    continue
                predicate = _before(lines, line.operands[0], _COPIES)
                is_array = predicate.shape.startswith("(") or predicate.dims
                if not is_array and not _is_of_an_index(predicate, lines):
                    self.taken[name, predicate.name] = set()

    def watch(self, computation: str, line: Instruction, value: np.ndarray) -> None:
        """Record the value of a predicate."""
        if (computation, line.name) in self.taken:
            self.taken[computation, line.name].update(np.unique(value).astype(int).tolist())

    @property
    def one_sided(self) -> tuple[str, ...]:
        """The predicates of choices that were made, and always in the same way."""
        return tuple(name for (_, name), sides in self.taken.items() if len(sides) == 1)
