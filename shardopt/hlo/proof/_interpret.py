"""Interpret a partitioned HLO module in numpy: all devices step through it together.

This is the second witness of a proof about a compiled program. The rules of the derivation are no
part of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shardopt.hlo._collective import permute_pairs, replica_groups
from shardopt.hlo._hlo_text import (
    Instruction,
    Module,
    end_of,
    entry_parameters,
    root_of,
    sizes_of_program,
)
from shardopt.hlo._walk import branches_of
from shardopt.hlo.proof import _interpret_collectives as collectives
from shardopt.hlo.proof._interpret_numpy import (
    CUSTOM_CALLS,
    UFUNCS,
    Operation,
    elementwise,
    exact_reciprocals,
    iota,
    reduce_rows,
    reduce_window,
    scatter,
    shaped,
    wide_float,
    widened,
)
from shardopt.hlo.proof._interpret_shards import cut, read_literal, written_shardings
from shardopt.hlo.proof._lines import Line, combiner, lines_of, read_shape
from shardopt.hlo.proof._opened import opened
from shardopt.trace._primitives import words

InterpretedValue = Any
"""An array [devices, ...local shape], or a tuple of values."""
Step = Callable[[np.ndarray, Sequence[InterpretedValue]], InterpretedValue]
"""From the positions of the devices that run it, and its operands, to its result."""
PlacedStep = tuple[Step, tuple[int, ...] | None, Instruction]
"""A step with the places of its operands; None for a parameter, which gets the arguments."""
MAX_ITERATIONS = 100_000
_PASSED = words(
    "parameter constant tuple get-tuple-element bitcast optimization-barrier fusion call while"
    " conditional"
)
"""These compute no numbers of their own."""


class CannotInterpretError(NotImplementedError):
    """An instruction that has no meaning in numpy here, or none at all because a device would wait
    forever.
    """

    def __init__(self, instruction: Instruction, reason: str) -> None:
        operand_text = instruction.arguments.partition(", metadata=")[0][:200]
        line = f"{instruction.name} = {instruction.shape} {instruction.opcode}({operand_text}"
        super().__init__(f"interpret: cannot interpret {line}: {reason.rstrip('.')}.")
        self.instruction = instruction
        self.reason = reason
        self.waits_forever = any(words in reason for words in collectives.STUCK)


@dataclass
class Interpreter:
    """A module whose computations become lists of numpy steps when they are first called.

    It computes in double precision, with no rounding in between, whatever the types of floats are.
    Floats of 8 bits keep their rounding: the program means it.

    Attributes:
      module: the parsed module.
      limit: the most numbers that are computed, of all devices, and in all turns of loops; None is
        no limit.
      moved: constants that are replaced, by their numbers.
      watch: called with the computation, the instruction and its value after each step.
      changed: the computation and the name of a predicate that is inverted; None is none.
      replicas: the number of replicas.
      partitions: the number of partitions of each replica.
      computed: how many numbers are computed so far.
    """

    module: Module
    limit: int | None = None
    moved: dict[float, float] = field(default_factory=dict)
    watch: Callable[[str, Instruction, InterpretedValue], object] | None = None
    changed: tuple[str, str] | None = None
    replicas: int = field(init=False)
    partitions: int = field(init=False)
    computed: int = field(init=False, default=0)
    _steps: dict[str, tuple[list[PlacedStep], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the number of devices, and make asynchronous instructions synchronous."""
        self.module = opened(self.module)
        self.replicas, self.partitions = sizes_of_program(self.module)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.partitions

    @property
    def devices(self) -> np.ndarray:
        """The positions of all devices."""
        return np.arange(self.num_devices)

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters of the entry computation, in order."""
        return entry_parameters(self.module)

    def shard(
        self, inputs: Sequence[np.ndarray], shardings: Sequence[str] | None = None
    ) -> list[np.ndarray]:
        """Cut whole arguments by shardings, by default the shardings that the text states of the
        parameters.
        """
        if shardings is None:
            shardings = written_shardings(self.parameters, self.num_devices)
        return [
            cut(np.asarray(value), sharding, self.num_devices)
            for value, sharding in zip(inputs, shardings, strict=True)
        ]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each result on all devices."""
        for line, value in zip(self.parameters, inputs, strict=True):
            shape = read_shape(line.shape)
            if value.shape != (self.num_devices, *shape.dims) or value.dtype != shape.dtype:
                raise ValueError(
                    f"interpret: {line.name} is {line.shape} on each device, got"
                    f" {value.dtype}{list(value.shape)}."
                )
        return self._results(self.devices, inputs)

    def _results(self, devices: np.ndarray, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        inputs = [value.astype(wide_float(value.dtype)) for value in inputs]
        self.computed = 0
        with np.errstate(all="ignore"):
            return jax.tree.leaves(self.call(self.module.entry, devices, inputs))

    def call(
        self, name: str, devices: np.ndarray, arguments: Sequence[InterpretedValue]
    ) -> InterpretedValue:
        """Return the result of a computation."""
        if name not in self._steps:
            self._steps[name] = self._build(name)
        steps, root = self._steps[name]
        values: list[InterpretedValue] = []
        for step, places, instruction in steps:
            operands = arguments if places is None else [values[place] for place in places]
            try:
                value = step(devices, operands)
            except (ValueError, IndexError, TypeError, KeyError) as error:
                raise CannotInterpretError(instruction, str(error)) from error
            if (name, instruction.name) == self.changed:
                value = ~value
            values.append(value)
            # Counted as it runs: turns of loops are known only then.
            self.computed += 0 if instruction.opcode in _PASSED else _size(value)
            if self.limit is not None and self.computed > self.limit:
                raise CannotInterpretError(
                    instruction, f"until then {self.computed:,} numbers are computed, too many"
                )
            if self.watch is not None:
                self.watch(name, instruction, value)
        return values[root]

    def _build(self, name: str) -> tuple[list[PlacedStep], int]:
        instructions = self.module.computations[name]
        lines = lines_of(instructions)
        place_of = {line.name: place for place, line in enumerate(lines)}
        steps = []
        for instruction, line in zip(instructions, lines, strict=True):
            if line.opcode == "parameter":
                index = int(line.literal)
                steps.append((lambda _, values, index=index: values[index], None, instruction))
                continue
            try:
                places = tuple(place_of[operand] for operand in line.operands)
                steps.append((self._step_of(line), places, instruction))
            except (ValueError, KeyError, IndexError) as error:
                raise CannotInterpretError(instruction, str(error)) from error
        return steps, place_of[root_of(self.module, name).name]

    def _step_of(self, line: Line) -> Step:
        wide = line if line.opcode == "constant" else widened(line)
        if wide == line or not line.reads_bits:
            return self._step(wide)
        step = self._step(line)  # a number has its bits in its own type
        source = line.operand(0).dtype
        target = wide.result.dtype
        # Values are in double precision here, so the bits of a float32 must be taken of a float32.
        return lambda devices, values: step(devices, [values[0].astype(source)]).astype(target)

    def _step(self, line: Line) -> Step:
        operation = elementwise(line) or shaped(line)
        if operation:
            return _local(operation)
        builder = getattr(self, "_" + line.opcode.replace("-", "_"), None)
        if builder is None:
            raise ValueError(f"the opcode {line.opcode} is not interpreted")
        return builder(line)

    def _iota(self, line: Line) -> Step:
        numbers = iota(line)
        return lambda devices, values: numbers(len(devices))

    def _constant(self, line: Line) -> Step:
        literal = read_literal(line.arguments[: end_of(line.arguments)], line.result)
        literal = literal.astype(widened(line).result.dtype)
        if literal.dtype.kind == "f":
            literal = exact_reciprocals(literal)
        if literal.ndim == 0:
            literal = np.array(self.moved.get(float(literal), literal), literal.dtype)
        return lambda devices, values: np.broadcast_to(literal, (len(devices), *literal.shape))

    # calls and control flow

    def _partition_id(self, line: Line) -> Step:
        return lambda devices, values: (devices % self.partitions).astype(np.uint32)

    def _replica_id(self, line: Line) -> Step:
        return lambda devices, values: (devices // self.partitions).astype(np.uint32)

    def _fusion(self, line: Line) -> Step:
        return lambda devices, values: self.call(line.callee, devices, values)

    _call = _fusion

    def _while(self, line: Line) -> Step:
        condition, body = (line.attributes[key].lstrip("%") for key in ("condition", "body"))

        def step(devices, values):
            state = values[0]
            for _ in range(MAX_ITERATIONS):
                goes_on = np.asarray(self.call(condition, devices, [state]))
                if not goes_on.any():
                    return state
                # Devices may leave a loop at different turns. The devices that stay run the body alone.
                if goes_on.all():
                    state = self.call(body, devices, [state])
                    continue
                rows = np.flatnonzero(goes_on)
                state = _put(state, rows, self.call(body, devices[rows], [_take(state, rows)]))
            raise ValueError(f"the loop turns more than {MAX_ITERATIONS} times")

        return step

    def _conditional(self, line: Line) -> Step:
        branches = branches_of(line.attributes)
        is_boolean = line.operand(0).dtype == np.bool_

        def step(devices, values):
            chosen = (
                ~values[0] * 1
                if is_boolean
                else np.where(
                    (values[0] < 0) | (values[0] >= len(branches)), len(branches) - 1, values[0]
                )
            )
            # Devices that take one branch run it together; a collective in it sees them alone, and
            # is refused if others of its group are missing.
            rows = [np.flatnonzero(chosen == branch) for branch in range(len(branches))]
            outcomes = [
                self.call(branch, devices[taken], [_take(operand, taken)])
                for branch, operand, taken in zip(branches, values[1:], rows, strict=True)
                if taken.size
            ]
            order = np.argsort(np.concatenate(rows))
            return jax.tree.map(lambda *parts: np.concatenate(parts)[order], *outcomes)

        return step

    # reductions by a computation of two numbers

    def _combiner(self, line: Line) -> str | None:
        """Return the opcode of a computation of two numbers."""
        return combiner(self.module.computations[line.callee])

    def _named_combiner(self, line: Line) -> str:
        """Return the opcode of such a computation, one of `UFUNCS` or "set"."""
        name = self._combiner(line)
        if name not in (*UFUNCS, "set"):
            raise ValueError(
                f"its computation {line.attributes['to_apply']} is more than one of"
                f" {', '.join(sorted(UFUNCS))}"
            )
        return name

    def _scalars(self, name: str, values: Sequence[np.ndarray]) -> InterpretedValue:
        """Apply a computation of single numbers to arrays: each place counts as a device of its
        own.
        """
        flat = [np.ascontiguousarray(value).reshape(-1) for value in values]
        result = self.call(name, np.arange(len(flat[0])), flat)
        return jax.tree.map(lambda part: part.reshape(values[0].shape), result)

    def _map(self, line: Line) -> Step:
        name = line.callee
        return lambda devices, values: self._scalars(name, values)

    def _reduce(self, line: Line) -> Step:
        name = line.callee
        axes = line.axes
        kind = self._combiner(line)
        count = len(line.operand_shapes) // 2
        if count == 1 and kind in UFUNCS:
            ufunc = UFUNCS[kind]
            return _local(lambda value, initial: reduce_rows(ufunc, value, axes, initial))

        def fold(devices, values):
            remaining_axes = [axis for axis in range(values[0].ndim) if axis not in axes]
            shape = tuple(values[0].shape[axis] for axis in remaining_axes)
            moved = [
                value.transpose(*remaining_axes, *axes).reshape(*shape, -1)
                for value in values[:count]
            ]
            total = [
                np.broadcast_to(value.reshape(-1, *(1,) * (len(shape) - 1)), shape)
                for value in values[count:]
            ]
            for place in range(moved[0].shape[-1]):
                result = self._scalars(name, [*total, *(value[..., place] for value in moved)])
                total = jax.tree.leaves(result)
            return line.results(total)

        return fold

    def _reduce_window(self, line: Line) -> Step:
        return _local(reduce_window(line, self._named_combiner(line)))

    def _scatter(self, line: Line) -> Step:
        return _local(scatter(line, self._named_combiner(line)))

    def _sort(self, line: Line) -> Step:
        """Sort by neighbours that change places, which is stable."""
        name = line.callee
        (axis,) = line.axes

        def step(devices, values):
            columns = [np.moveaxis(value, axis, -1).copy() for value in values]
            length = columns[0].shape[-1]
            for turn in range(length):
                first = slice(turn % 2, length - 1, 2)
                second = slice(turn % 2 + 1, length, 2)
                pairs = [
                    part for column in columns for part in (column[..., second], column[..., first])
                ]
                if pairs[0].size == 0:
                    continue
                swaps = self._scalars(name, pairs)
                for column in columns:
                    a = column[..., first].copy()
                    b = column[..., second].copy()
                    column[..., first], column[..., second] = (
                        np.where(swaps, b, a),
                        np.where(swaps, a, b),
                    )
            return line.results([np.moveaxis(column, -1, axis) for column in columns])

        return step

    def _custom_call(self, line: Line) -> Step:
        if line.target == "AllocateBuffer":
            shape = line.result
            return lambda devices, values: np.zeros((len(devices), *shape.dims), shape.dtype)
        if line.target not in CUSTOM_CALLS:
            raise ValueError(f"the custom call {line.target} is not interpreted")
        return _local(CUSTOM_CALLS[line.target](line))

    # collectives

    def _in_groups(self, line: Line, function: Callable[..., InterpretedValue]) -> Step:
        """Return a function of the operands, and of the rows of each group, as a step."""
        groups = replica_groups(line.opcode, line.attributes, self.replicas, self.partitions)
        return lambda devices, values: function(values, collectives.rows_of(groups, devices))

    def _collective(self, line: Line) -> Step:
        """Return a collective whose results follow from the values of a group."""
        dim = (*line.integers("dimensions"), 0)[0]
        ufunc: Any = UFUNCS[self._named_combiner(line)] if line.opcode in _REDUCTIONS else None

        def reduced(values):
            return ufunc.reduce(values, axis=0, dtype=values.dtype)

        function = {
            "all-reduce": lambda values: collectives.copies(values, reduced(values)),
            "reduce-scatter": lambda values: np.split(reduced(values), len(values), dim),
            "all-gather": lambda values: collectives.copies(
                values, np.concatenate(list(values), dim)
            ),
            "all-to-all": lambda values: collectives.all_to_all(values, dim),
            "collective-broadcast": lambda values: collectives.copies(values, values[0]),
        }[line.opcode]

        def results(values, rows):
            return line.results([collectives.in_groups(value, rows, function) for value in values])

        return self._in_groups(line, results)

    _all_reduce = _reduce_scatter = _all_gather = _collective_broadcast = _collective

    def _all_to_all(self, line: Line) -> Step:
        if "dimensions" in line.attributes:
            return self._collective(line)
        return self._in_groups(line, collectives.exchange)

    def _ragged_all_to_all(self, line: Line) -> Step:
        return self._in_groups(line, collectives.ragged_all_to_all)

    def _collective_permute(self, line: Line) -> Step:
        pairs = permute_pairs(line.attributes, self.replicas, self.partitions)
        return lambda devices, values: line.results(
            [collectives.permute(value, pairs, devices) for value in values]
        )


_REDUCTIONS = ("all-reduce", "reduce-scatter")


def _local(operation: Operation) -> Step:
    """Return an operation that is the same on all devices as a step."""
    return lambda devices, values: operation(*values)


def _size(value: InterpretedValue) -> int:
    return sum(part.size for part in jax.tree.leaves(value))


def _take(value: InterpretedValue, rows: np.ndarray) -> InterpretedValue:
    return jax.tree.map(lambda part: part[rows], value)


def _put(value: InterpretedValue, rows: np.ndarray, update: InterpretedValue) -> InterpretedValue:
    def put(part, new):
        part = np.array(part)
        part[rows] = new
        return part

    return jax.tree.map(put, value, update)
