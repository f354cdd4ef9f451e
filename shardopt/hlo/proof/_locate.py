"""The first wrong instruction of a program whose results differ from the program that XLA was
given.

Each value of the compiled program is searched among the values of the other program. Devices may
hold copies of a value, pieces of it, or terms of a sum, over each set of mesh axes. The order of
the elements is ignored. From a result that differs, the search goes back to the first instruction
whose operands are all values of the other program, and whose result is none.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from shardopt.hlo._collective import Groups
from shardopt.hlo._hlo_text import Instruction, Module, attributes, operands, root_of
from shardopt.hlo._walk import KINDS, callees
from shardopt.hlo.proof._interpret import InterpretedValue, Interpreter

CLOSE = 1e-10
"""Values are the same if the sums of their powers agree up to this."""


class ResultDifference(NamedTuple):
    """A result that differs.

    Attributes:
      instruction: the first wrong instruction; None if it is not found.
      reason: the mistake, as a sentence.
      groups: the devices over which a sum is missing.
    """

    instruction: Instruction | None
    reason: str
    groups: Groups = ()


Recorded = dict[tuple[str, str], InterpretedValue]
"""The value of each instruction when it runs first, by computation and name."""


def recorded(interpreter: Interpreter, arguments: Sequence[np.ndarray]) -> Recorded:
    """Return the value of each instruction of a program."""
    values: Recorded = {}
    interpreter.watch = lambda computation, line, value: values.setdefault(
        (computation, line.name), value
    )
    interpreter.run(arguments)
    interpreter.watch = None
    return values


def locate(
    interpreter: Interpreter,
    arguments: Sequence[np.ndarray],
    known: Recorded,
    result: int,
    sizes: Mapping[str, int],
) -> ResultDifference | None:
    """Return the first wrong instruction before a result; None if it is not found.

    Args:
      interpreter: the interpreter of the compiled program.
      arguments: its arguments.
      known: the values of the program that XLA was given.
      result: index of a result that differs.
      sizes: mesh axis to size; if it is empty, all devices are one axis.
    """
    devices = interpreter.num_devices
    shape = tuple(sizes.values()) if math.prod(sizes.values()) == devices else (devices,)
    values = recorded(interpreter, arguments)
    return _Search(interpreter.module, values, _Known(known.values(), devices), shape).first_wrong(
        result
    )


def is_collective(line: Instruction) -> bool:
    """Return whether an instruction exchanges values between devices."""
    return line.opcode.startswith(KINDS)


def _features(value: np.ndarray) -> np.ndarray:
    """Return sums of powers of the numbers of each device. They add up over pieces."""
    flat = value.reshape(len(value), -1).astype(np.float64)
    size = np.abs(flat)
    return np.stack(
        [(flat != 0).sum(1), size.sum(1), (flat**2).sum(1), (flat * size).sum(1), (size**3).sum(1)],
        axis=1,
    )


class _Known:
    """The values of the other program as sums of powers, sorted by the sum of squares on the first
    device.
    """

    def __init__(self, values: Iterable[InterpretedValue], devices: int) -> None:
        rows = [
            _features(array)
            for value in values
            for array in jax.tree.leaves(value)
            if len(array) in (1, devices)
        ]
        table = np.stack([np.broadcast_to(row, (devices, row.shape[1])) for row in rows])
        self.table = table[np.argsort(table[:, 0, 2])]
        self.squares = self.table[:, 0, 2]

    def has(self, features: np.ndarray) -> bool:
        """Return whether a value has these sums on each device."""
        square = features[0, 2]
        first, last = np.searchsorted(self.squares, [square * (1 - CLOSE), square * (1 + CLOSE)])
        near = self.table[first : last + 1]
        scale = np.abs(features[:, [0, 1, 2, 2, 4]]) + 1e-30
        with np.errstate(invalid="ignore"):  # infinite numbers are never close
            return bool((np.abs(near - features) <= CLOSE * scale).all((1, 2)).any())


class _Search:
    def __init__(
        self,
        module: Module,
        values: dict[tuple[str, str], InterpretedValue],
        known: _Known,
        shape: tuple[int, ...],
    ) -> None:
        self.module = module
        self.values = values
        self.known = known
        self.shape = shape
        self.lines = {
            (name, line.name): line for name, lines in module.computations.items() for line in lines
        }
        self.order = {key: place for place, key in enumerate(self.lines)}
        self.right: dict[tuple[str, str, int], bool] = {}
        self.callers = {
            callee: line
            for line in self.lines.values()
            if line.opcode == "fusion"
            for callee in callees(line)
        }

    def first_wrong(self, result: int) -> ResultDifference | None:
        """Go back from a result."""
        entry = self.module.entry
        root = root_of(self.module)
        # Back from a wrong result to its first wrong source: a node whose sources are all right,
        # and it is not.
        waiting = [(entry, root.name, result)]
        seen = set()
        sites = []
        # this result is wrong, even if its numbers are another value of the program
        self.right[waiting[0]] = False
        if root.opcode == "tuple":
            self.right[self._sources(waiting[0])[0]] = False
        while waiting:
            node = waiting.pop()
            if node in seen or self._is_right(node):
                continue
            seen.add(node)
            sources = [source for source in self._sources(node) if not self._is_right(source)]
            waiting += sources
            line = self.lines[node[:2]]
            if not sources and line.opcode not in ("parameter", "tuple", "get-tuple-element"):
                inner = self._inside(node)
                waiting += inner
                if all(map(self._is_right, inner)):
                    sites.append(node)
        described = [
            self._site(node) for node in sorted(sites, key=lambda node: self.order[node[:2]])
        ]
        # a sum that is missing, then a collective, then the order of the program
        return min(
            described,
            key=lambda site: (
                not site.groups,
                site.instruction is None or not is_collective(site.instruction),
            ),
            default=None,
        )

    def _sources(self, node: tuple[str, str, int]) -> list[tuple[str, str, int]]:
        """Return the elements, in the same computation, from which an element of a result follows."""
        computation, name, index = node
        line = self.lines[computation, name]
        if line.opcode in ("parameter", "constant", "iota"):
            return []
        read = [
            (computation, operand)
            for operand in operands(line)
            if (computation, operand) in self.lines
        ]
        if line.opcode == "get-tuple-element":
            return [(*read[0], int(attributes(line)["index"]))]
        if line.opcode == "tuple":
            return [(*read[index], 0)]
        if line.opcode == "while":
            return [(*read[0], index)]
        return [(*key, place) for key in read for place in range(self._width(key))]

    def _inside(self, node: tuple[str, str, int]) -> list[tuple[str, str, int]]:
        """Return the same element of the root of each computation that an instruction calls."""
        called = callees(self.lines[node[:2]])
        roots = [(name, root_of(self.module, name).name) for name in called]
        return [(*root, node[2]) for root in roots if root in self.values]

    def _width(self, key: tuple[str, str]) -> int:
        value = self.values.get(key)
        return len(value) if isinstance(value, tuple) else 1

    def _array(self, node: tuple[str, str, int]) -> np.ndarray | None:
        value = self.values.get(node[:2])
        if isinstance(value, tuple):
            value = value[node[2]] if node[2] < len(value) else None
        return (
            value if isinstance(value, np.ndarray) and len(value) == math.prod(self.shape) else None
        )

    def _is_right(self, node: tuple[str, str, int]) -> bool:
        if node not in self.right:
            array = self._array(node)
            # numbers that follow from no argument are not compared
            self.right[node] = array is None or array.dtype.kind != "f" or self._matches(array)
        return self.right[node]

    def _matches(self, array: np.ndarray) -> bool:
        if (
            array.size == len(array)
            and np.unique(array).size == 1
            and float(array.flat[0]).is_integer()
        ):
            return True
        return any(self.known.has(features) for _, features in self._readings(array))

    def _readings(self, array: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield each way to hold a value: the axes of its sum, and its sums of powers on each
        device.
        """
        axes = [axis for axis, size in enumerate(self.shape) if size > 1]
        grid = array.reshape(*self.shape, *array.shape[1:])
        # 0: copies along the axis, 1: pieces, 2: terms of a sum. Sums of powers add up over pieces,
        # so no order of elements has to be known.
        for kinds in sorted(itertools.product((0, 1, 2), repeat=len(axes)), key=sum):
            summed = tuple(axis for axis, kind in zip(axes, kinds, strict=True) if kind == 2)
            pieces = tuple(axis for axis, kind in zip(axes, kinds, strict=True) if kind == 1)
            total = grid.sum(summed, keepdims=True)
            features = _features(total.reshape(-1, *array.shape[1:])).reshape(
                *total.shape[: len(self.shape)], -1
            )
            features = features.sum(pieces, keepdims=True)
            yield (
                summed,
                np.broadcast_to(features, (*self.shape, features.shape[-1])).reshape(
                    len(array), -1
                ),
            )

    def _site(self, node: tuple[str, str, int]) -> ResultDifference:
        """Return the report of a node, with the groups of a sum that one of its operands needs."""
        line = self.lines[node[:2]]
        reduces = line.opcode.startswith(("all-reduce", "reduce-scatter"))
        for source in self._sources(node):
            array = self._array(source)
            if array is None or array.dtype.kind != "f" or reduces or not array.any():
                continue
            matching = (
                summed
                for summed, features in self._readings(array)
                if summed and self.known.has(features)
            )
            summed = next(matching, None)
            if summed:
                name = self._name(source)
                step = (
                    f"it reads {name} as if it were whole, and the sum of {name} over these devices"
                    " is not taken"
                )
                return ResultDifference(line, step, self._groups(summed))
        step = "its operands are values of the program that XLA was given, and its result is none"
        return ResultDifference(line, step)

    def _name(self, node: tuple[str, str, int]) -> str:
        """Return the name of a value; of a parameter of a fusion, the name outside."""
        line = self.lines[node[:2]]
        caller = self.callers.get(node[0])
        return (
            node[1]
            if caller is None or line.opcode != "parameter"
            else operands(caller)[int(operands(line)[0])]
        )

    def _groups(self, summed: tuple[int, ...]) -> Groups:
        ids = np.arange(math.prod(self.shape)).reshape(self.shape)
        other_axes = [axis for axis in range(len(self.shape)) if axis not in summed]
        size = math.prod(self.shape[axis] for axis in summed)
        return tuple(map(tuple, ids.transpose(*other_axes, *summed).reshape(-1, size).tolist()))
