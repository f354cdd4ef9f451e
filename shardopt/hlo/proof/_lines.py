"""The instructions of a module with their shapes, operands and attributes parsed once."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardopt.hlo._hlo_text import (
    Instruction,
    Module,
    array_shape,
    arrays,
    attributes,
    cached,
    elements,
    numbers,
    operands,
    sizes_of_program,
)

_BITS = (8, 16, 32, 64)
INTEGERS = {
    "pred": np.dtype(bool),
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in _BITS},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in _BITS},
}
"""Types of whole numbers -> their types in numpy."""
_EIGHT_BITS = ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3", "e3m4", "e8m0fnu")
_NUMPY = {
    **INTEGERS,
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in _BITS[1:]},
    **{f"f8{name}": jnp.dtype(f"float8_{name}") for name in _EIGHT_BITS},
    "bf16": jnp.dtype("bfloat16"),
    "s4": jnp.dtype("int4"),
    "u4": jnp.dtype("uint4"),
    "c64": np.dtype(np.complex64),
    "c128": np.dtype(np.complex128),
}
_ARRAY = re.compile(
    r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*)(?::(?:T\((?P<tile>[\d,]+)\))?[^}]*)?\})?$"
)


class Shape(NamedTuple):
    """An array of HLO: its type, its dims, its dims from the fastest to the slowest in memory, and
    its tile.
    """

    dtype: np.dtype
    dims: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...]

    def without_ones(self) -> list[int]:
        """Return the dims from the slowest to the fastest in memory; dims of size 1 are left out."""
        return [self.dims[dim] for dim in reversed(self.order) if self.dims[dim] != 1]


@cached
def read_shape(text: str) -> Shape:
    """Parse `f32[8,4]{1,0:T(8,128)}`; raise ValueError for tuples, dynamic dims and unknown types.

    Example:
      >>> read_shape("bf16[8,4]{0,1}").order
      (0, 1)
    """
    match = _ARRAY.match(text.strip())
    if not match or match["dtype"] not in _NUMPY:
        raise ValueError(f"its shape {text} has no array in numpy")
    dims = numbers(match["dims"])
    order = tuple(reversed(range(len(dims)))) if match["order"] is None else numbers(match["order"])
    return Shape(_NUMPY[match["dtype"]], dims, order, numbers(match["tile"] or ""))


class Line(NamedTuple):
    """One instruction.

    Attributes:
      name: its name.
      shape: its shape as text.
      opcode: its opcode.
      arguments: the text after the opcode.
      is_root: whether it is the result of its computation.
      operands: the names of its operands.
      operand_shapes: their shapes as text.
      attributes: its attributes as text.
      order: its index in the text of the module.
      devices: the number of devices of the program.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    is_root: bool
    operands: tuple[str, ...]
    operand_shapes: tuple[str, ...]
    attributes: dict[str, str]
    order: int
    devices: int

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an attribute such as `dimensions={0,2}`."""
        return numbers(self.attributes.get(key, ""))

    @property
    def axes(self) -> tuple[int, ...]:
        """The attribute `dimensions` as axes of an array [devices, ...]."""
        return tuple(dim + 1 for dim in self.integers("dimensions"))

    def pairs(self, *keys: str) -> list[tuple[int, int]]:
        """Return the pairs of dims that two attributes list."""
        return list(zip(*map(self.integers, keys), strict=True))

    @property
    def dot_dims(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pairs of batch dims of an inner product, and of contracted dims."""
        return (
            self.pairs("lhs_batch_dims", "rhs_batch_dims"),
            self.pairs("lhs_contracting_dims", "rhs_contracting_dims"),
        )

    def results(self, values: Sequence[Any]) -> Any:
        """Return the values as the result: a tuple, or the only one."""
        return tuple(values) if self.shape.startswith("(") else values[0]

    @property
    def dims(self) -> tuple[int, ...]:
        """The local shape of the result, an array."""
        return array_shape(self.shape)

    @property
    def result(self) -> Shape:
        """The shape of the result, an array."""
        return read_shape(self.shape)

    def operand(self, index: int) -> Shape:
        """Return the shape of an operand, an array."""
        return read_shape(self.operand_shapes[index])

    @property
    def reads_bits(self) -> bool:
        """Whether it takes the bits of numbers for numbers of another type."""
        is_cast = self.opcode in ("bitcast", "bitcast-convert")
        return is_cast and dtype_of(self.shape) != dtype_of(self.operand_shapes[0])

    @property
    def literal(self) -> str:
        """The number of a constant, or of a parameter among its arguments, as text."""
        return self.arguments.partition(")")[0]

    @property
    def bounds(self) -> list[tuple[int, int, int]]:
        """The (start, stop, stride) of each dim of a slice."""
        parts = [numbers(part) for part in self.attributes["slice"].split("]")]
        return [(*part, 1)[:3] for part in parts if part]  # pyright: ignore[reportReturnType]

    @property
    def callee(self) -> str:
        """The computation that it calls or reduces with."""
        return self.attributes.get("calls", self.attributes.get("to_apply", "")).strip("{}% ")

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attributes.get("custom_call_target", "").strip('"')


def lines_of(
    instructions: Sequence[Instruction], first: int = 0, devices: int = 1
) -> tuple[Line, ...]:
    """Return the lines of a computation, whose first instruction has the index `first`."""
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    lines = []
    for order, instruction in enumerate(instructions, first):
        is_literal = instruction.opcode in ("constant", "parameter", "iota")
        names = () if is_literal else tuple(operands(instruction))
        shapes_read = tuple(shapes.get(name, "") for name in names)
        words = attributes(instruction)
        lines.append(Line(*instruction, names, shapes_read, words, order, devices))
    return tuple(lines)


def combiner(instructions: Sequence[Any]) -> str | None:
    """Return the opcode by which a computation combines its two parameters, `set` if it returns the
    second one; None for any other computation.
    """
    lines = {line.name: line for line in instructions}

    def source(name: str) -> Any:
        while lines[name].opcode in ("convert", "custom-call"):
            name = operands(lines[name])[0]
        return lines[name]

    root = source(next(line.name for line in instructions if line.is_root))
    if root.opcode == "parameter":
        return "set" if operands(root) == ["1"] else None
    sources = [source(name) for name in operands(root) if name in lines]
    read = sorted(operands(line)[0] for line in sources if line.opcode == "parameter")
    return root.opcode if read == ["0", "1"] and len(sources) == 2 else None


def read_lines(module: Module) -> dict[str, tuple[Line, ...]]:
    """Return the lines of every computation."""
    replicas, partitions = sizes_of_program(module)
    computations: dict[str, tuple[Line, ...]] = {}
    first = 0
    for name, instructions in module.computations.items():
        computations[name] = lines_of(instructions, first, replicas * partitions)
        first += len(instructions)
    return computations


@cached
def dtype_of(shape: str) -> str:
    """Return the element type of an array shape as text."""
    return arrays(shape)[0].split("[")[0]


@cached
def major_to_minor(shape: str) -> tuple[int, ...]:
    """Return the order of the dims in memory, major first."""
    return tuple(reversed(read_shape(elements(shape)[0]).order))
