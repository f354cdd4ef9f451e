"""The time of operations without products: one rule for XLA's operations and for Pallas kernels.

An operation takes the longer of two times: its bytes in HBM at a share of the bandwidth, and its
arithmetic on the vector units. XLA's `estimated_cycles` are not read: they are 1.4 to 12 times the
bytes over the bandwidth, and numbers in bfloat16 have the cycles of numbers in float32.
"""

import csv
import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import NamedTuple

from shardopt.core._errors import error_text
from shardopt.hlo._hlo_text import (
    Instruction,
    Module,
    array_shape,
    elements,
    operands,
    root_of,
    tiled_nbytes,
)
from shardopt.planning._hardware import Hardware

_FILE = Path(__file__).with_name("memory_shares.csv")
_ROWS = {
    row["generation"]: row for row in csv.DictReader(_FILE.read_text(encoding="utf-8").splitlines())
}
MEMORY_SHARES = {name: float(row["share"]) for name, row in _ROWS.items()}
"""Generation of TPU -> the share of the HBM bandwidth that operations without products reach."""

ERROR_BARS = {
    name: (int(row["runs"]), float(row["least"]), float(row["most"]))
    for name, row in _ROWS.items()
    if row["least"]
}
"""Generation -> measured runs, and how many times as long as estimated at its share they took: the
shortest and the longest (`benchmarks/results/measured_runs.json`).
"""

LANES = 8 * 128
"""Numbers of 32 bits in a vector register."""

VECTOR_SLOTS = 4
"""Vector operations that a core starts in a cycle. The first functions of a second unit, such as
exponentials, start one in a cycle.

"How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) counts four units in each lane.
"""


class VectorWork(NamedTuple):
    """Vector operations and transcendental functions, each on one number."""

    operations: float
    transcendentals: float = 0.0


KERNELS = {
    "inverse_rms": VectorWork(3),
    "gradient_of_norm": VectorWork(16),
    "rotate_halves": VectorWork(5),
}
"""Kernels of shardopt without products: their operations for each number of the largest input."""


def memory_share(chip: Hardware) -> float:
    """Return the share of the HBM bandwidth for a chip.

    Raises:
      ValueError: if the table has no row for it.
    """
    if chip.name not in MEMORY_SHARES:
        problem = f"{_FILE.name} has no share of the HBM bandwidth for {chip.name!r}."
        raise ValueError(error_text(problem, fix="pass memory_share=, such as 0.7."))
    return MEMORY_SHARES[chip.name]


def error_bar(chip: str, share: float) -> str:
    """Return how far measured runs were from estimates, in words.

    Example:
      >>> error_bar("v4", 0.7)
      'no measured run on v4 tells the error'
    """
    if chip not in ERROR_BARS:
        return f"no measured run on {chip} tells the error"
    if share != MEMORY_SHARES[chip]:
        return f"no measured run on {chip} at {share:g} of its bandwidth tells the error"
    runs, shortest, longest = ERROR_BARS[chip]
    return f"{runs} measured runs on {chip} took {shortest:.2f} to {longest:.2f} times as long"


@dataclasses.dataclass(frozen=True)
class VectorUnits:
    """The rates of a device for operations without products.

    Attributes:
      memory_bandwidth: bytes per second that operations reach.
      lane_rate: numbers per second that one slot of all cores takes.
    """

    memory_bandwidth: float
    lane_rate: float

    @classmethod
    def of(cls, chip: Hardware, share: float) -> "VectorUnits":
        """Return the rates of a chip."""
        assert chip.clock is not None
        return cls(share * chip.memory_bandwidth, LANES * chip.cores * chip.clock)

    def seconds(self, nbytes: float, work: VectorWork) -> float:
        """Return the seconds of so many bytes and so much arithmetic, which overlap."""
        arithmetic = max(work.operations / VECTOR_SLOTS, work.transcendentals) / self.lane_rate
        return max(nbytes / self.memory_bandwidth, arithmetic)


class FusionReader:
    """What the operations of a module read, write and compute."""

    def __init__(self, module: Module):
        self._module = module
        self._bodies: dict[str, dict[str, Instruction]] = {}
        self._users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def has_product(self, line: Instruction) -> bool:
        """Return whether an operation multiplies matrices."""
        if line.opcode in ("convolution", "dot", "ragged-dot"):
            return True
        return line.opcode == "fusion" and any(
            self.has_product(inner) for inner in self._body(_callee(line)).values()
        )

    def multiplies_eight_bits(self, line: Instruction) -> bool:
        """Return whether all matrices that a fusion multiplies have numbers of 8 bits."""
        body = self._body(_callee(line))
        products = [inner for inner in body.values() if inner.opcode in ("convolution", "dot")]
        inputs = [body[name].shape for inner in products for name in operands(inner)]
        nested = [inner for inner in body.values() if self.has_product(inner)]
        return all(shape.startswith(_EIGHT_BITS) for shape in inputs) and all(
            inner in products or self.multiplies_eight_bits(inner) for inner in nested
        )

    def moved_bytes(self, line: Instruction, shapes: dict[str, str]) -> int:
        """Return the bytes that an operation reads from HBM and writes to it.

        Slices read what they take, and updates in place write what they bring.
        """
        body = {name: Instruction(name, shape, "", "", False) for name, shape in shapes.items()}
        read = sum(
            self._read(line, place, shapes[name], body)
            for place, name in enumerate(operands(line))
            if name in shapes
        )
        return read + self._written(line, line.shape, body)

    def work(self, line: Instruction, shapes: dict[str, str]) -> VectorWork:
        """Return the vector operations and transcendental functions of an operation."""
        if line.opcode == "fusion":
            body = self._body(_callee(line))
            inner_shapes = {name: inner.shape for name, inner in body.items()}
            parts = [self.work(inner, inner_shapes) for inner in body.values()]
            return VectorWork(
                math.fsum(part.operations for part in parts),
                math.fsum(part.transcendentals for part in parts),
            )
        if line.opcode in _MOVES:
            return VectorWork(0)
        size = sum(math.prod(array_shape(part)) for part in elements(line.shape)[:1])
        if line.opcode in _TRANSCENDENTAL:
            return VectorWork(0, size)
        if line.opcode in ("reduce", "reduce-window"):
            inputs = operands(line)
            size = max(
                (math.prod(array_shape(shapes[name])) for name in inputs if name in shapes),
                default=size,
            )
            combiner = self._body(_callee(line)).values()
            return VectorWork(size * sum(inner.opcode not in _MOVES for inner in combiner))
        return VectorWork(size)

    def _body(self, name: str) -> dict[str, Instruction]:
        if name not in self._bodies:
            lines = self._module.computations.get(name, ())
            self._bodies[name] = {line.name: line for line in lines}
        return self._bodies[name]

    def _users_in(self, computation: str) -> dict[str, list[tuple[Instruction, int]]]:
        """Return the readers of each value of a computation, with the place of the operand."""
        if computation not in self._users:
            users: dict[str, list[tuple[Instruction, int]]] = {}
            for line in self._body(computation).values():
                for place, name in enumerate(operands(line)):
                    users.setdefault(name, []).append((line, place))
            self._users[computation] = users
        return self._users[computation]

    def _read(self, line: Instruction, place: int, shape: str, body: dict[str, Instruction]) -> int:
        """Return the bytes that an operation reads of an operand of this shape."""
        if not is_in_hbm(shape):
            return 0
        whole = tiled_nbytes(shape)
        if line.opcode == "fusion":
            callee = _callee(line)
            parameter = next(
                (
                    inner.name
                    for inner in self._body(callee).values()
                    if inner.opcode == "parameter" and operands(inner) == [str(place)]
                ),
                None,
            )
            return whole if parameter is None else self._read_in(callee, parameter, shape)
        if place == 0 and line.opcode in ("slice", "dynamic-slice", "gather"):
            return min(whole, tiled_nbytes(line.shape))
        if place == 0 and line.opcode in ("dynamic-update-slice", "scatter"):
            # an update in place reads nothing of the rest; a scatter adds to what is there
            return self._update(line, body) if line.opcode == "scatter" else 0
        return whole

    def _read_in(self, computation: str, name: str, shape: str) -> int:
        """Return the bytes that a fused computation reads of one of its values."""
        body = self._body(computation)
        if body[name].is_root:
            return tiled_nbytes(shape)
        total = 0
        for user, place in self._users_in(computation).get(name, ()):
            if user.opcode in _FOLLOWED or self._only_moves(user):
                total += self._read_in(computation, user.name, shape)
            else:
                total += self._read(user, place, shape, body)
        return min(total, tiled_nbytes(shape))

    def _only_moves(self, line: Instruction) -> bool:
        """Return whether a fusion in a fusion changes only the layout or the dtype of its input."""
        return line.opcode == "fusion" and all(
            inner.opcode == "parameter" or inner.opcode in _FOLLOWED
            for inner in self._body(_callee(line)).values()
        )

    def _written(self, line: Instruction, shape: str, body: dict[str, Instruction]) -> int:
        """Return the bytes that an operation writes to a result of this shape."""
        if line.opcode == "fusion":
            callee = _callee(line)
            lines = self._module.computations.get(callee)
            if lines:
                return self._written(root_of(self._module, callee), shape, self._body(callee))
        if line.opcode == "tuple":
            parts = zip(operands(line), elements(shape), strict=True)
            return sum(self._written(body[name], part, body) for name, part in parts)
        if not shape.startswith("(") and not is_in_hbm(shape):
            return 0
        if line.opcode in ("dynamic-update-slice", "scatter"):
            return self._update(line, body)
        if line.opcode == "bitcast" and operands(line)[0] in body:
            return self._written(body[operands(line)[0]], shape, body)
        return sum(tiled_nbytes(part) for part in elements(shape) if is_in_hbm(part))

    def _update(self, line: Instruction, body: dict[str, Instruction]) -> int:
        """Return the bytes of what an update brings."""
        inputs = operands(line)
        name = inputs[1] if line.opcode == "dynamic-update-slice" else inputs[-1]
        return tiled_nbytes(body[name].shape) if name in body else tiled_nbytes(line.shape)


@functools.cache
def is_in_hbm(shape: str) -> bool:
    """Return whether an array lies in HBM: XLA marks other memories in its layout, such as S(1)."""
    return not re.search(r"[:)]S\([1-9]", shape)


def _callee(line: Instruction) -> str:
    match = re.search(r"\b(?:calls|to_apply)=%?([\w.\-]+)", line.arguments)
    return match[1] if match else ""


_EIGHT_BITS = ("s8", "u8", "f8")

_FOLLOWED = ("bitcast", "reshape", "transpose", "copy", "convert", "pad")
"""Operations in a fusion that compute only what their reader takes."""

_MOVES = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "broadcast",
        "reshape",
        "transpose",
        "copy",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "pad",
        "concatenate",
        "iota",
        "gather",
        "scatter",
        "reverse",
        "after-all",
        "convolution",
        "dot",
        "custom-call",
        "opt-barrier",
    ]
)
_TRANSCENDENTAL = frozenset(
    [
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "tanh",
        "rsqrt",
        "sqrt",
        "cbrt",
        "divide",
        "power",
        "sine",
        "cosine",
        "tan",
        "atan2",
        "erf",
        "remainder",
    ]
)
