"""Interpret a partitioned HLO module in numpy: all devices step through it together.

This is the second witness of a proof about a compiled program. The rules of the derivation are no
part of it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardopt.hlo._hlo_text import (
    Instruction,
    Module,
    attributes,
    entry_parameters,
    header_count,
    operands,
    parse,
)
from shardopt.hlo.proof import _interpret_collectives as collectives
from shardopt.hlo.proof._interpret_collectives import Devices
from shardopt.hlo.proof._interpret_numpy import (
    CUSTOM_CALLS,
    UFUNCS,
    Line,
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
from shardopt.hlo.proof._interpret_shards import (
    cut,
    error_between,
    join,
    read_literal,
    read_shape,
    written_shardings,
)
from shardopt.hlo.proof._opened import opened

Value = Any
"""An array [devices, ...local shape], or a tuple of values."""
Step = Callable[[Devices, list[Value]], Value]
MAX_ITERATIONS = 100_000
_PASSED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier")
_PASSED += ("fusion", "call", "while", "conditional")
"""These compute no numbers of their own."""


class CannotInterpretError(NotImplementedError):
    """An instruction that has no meaning in numpy here, or none at all because a device would wait
    forever.
    """

    def __init__(self, instruction: Instruction, reason: str) -> None:
        operand_text = instruction.rest.partition(", metadata=")[0][:200]
        line = f"{instruction.name} = {instruction.shape} {instruction.opcode}({operand_text}"
        super().__init__(f"interpret: cannot interpret {line}: {reason.rstrip('.')}.")
        self.instruction, self.reason = instruction, reason
        self.waits_forever = any(words in reason for words in collectives.STUCK)


def interpret(program: str | Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a compiled program on all its devices in numpy.

    Args:
      program: the text of a partitioned HLO module, or the parsed module.
      inputs: for each parameter an array `[devices, ...local shape]`.

    Returns:
      For each result an array `[devices, ...local shape]`.

    Raises:
      CannotInterpretError: if it cannot interpret an instruction, with the instruction and the
        reason.
    """
    return Interpreter(parse(program) if isinstance(program, str) else program).run(inputs)


def compare(
    program: str | Module,
    inputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    outputs: Sequence[str],
    *,
    input_shardings: Sequence[str] | None = None,
) -> list[float]:
    """Return the largest error of each result of a partitioned program, relative to one device's
    largest number.

    Args:
      program: the text of a partitioned HLO module, or the parsed module.
      inputs: the whole arguments.
      expected: the whole results on one device.
      outputs: the sharding of each result, as HLO text, such as `{devices=[8,1]<=[8]}`.
      input_shardings: the sharding of each argument; by default those in the text, which XLA:TPU
        leaves out.

    Raises:
      CannotInterpretError: if it cannot interpret an instruction.
      ValueError: if copies of a shard differ between devices.
    """
    interpreter = Interpreter(parse(program) if isinstance(program, str) else program)
    results = interpreter.run(interpreter.shard(inputs, input_shardings))
    return [
        error_between(join(shards, sharding), np.asarray(whole))
        for shards, sharding, whole in zip(results, outputs, expected, strict=True)
    ]


@dataclass
class Interpreter:
    """A module whose computations become lists of numpy steps when they are first called.

    Attributes:
      module: the parsed module.
      exact: whether to compute in double precision, with no rounding in between, whatever the types
        of floats are.
      limit: the most numbers that are computed, of all devices, and in all turns of loops; None is
        no limit.
      moved: constants that are replaced, by their numbers.
      watch: called with the computation, the instruction and its value after each step.
      replicas: the number of replicas.
      partitions: the number of partitions of each replica.
      computed: how many numbers are computed so far.
    """

    module: Module
    exact: bool = False
    limit: int | None = None
    moved: dict[float, float] = field(default_factory=dict)
    watch: Callable[[str, Instruction, Value], object] | None = None
    replicas: int = field(init=False)
    partitions: int = field(init=False)
    computed: int = field(init=False, default=0)
    _steps: dict[str, tuple[list[tuple[Step, tuple[int, ...], Instruction]], int]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Read the number of devices, and make asynchronous instructions synchronous."""
        self.module = opened(self.module)
        self.replicas, self.partitions = (
            header_count(self.module.header, key) for key in ("replica_count", "num_partitions")
        )

    @property
    def devices(self) -> Devices:
        """All devices."""
        return Devices(np.arange(self.replicas * self.partitions), self.replicas, self.partitions)

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters of the entry computation, in order."""
        return entry_parameters(self.module)

    def shard(
        self, inputs: Sequence[np.ndarray], shardings: Sequence[str] | None = None
    ) -> list[np.ndarray]:
        """Cut whole arguments by shardings, by default those that the text states of the
        parameters.
        """
        count = self.replicas * self.partitions
        shardings = written_shardings(self.parameters, count) if shardings is None else shardings
        return [
            cut(np.asarray(value), sharding, count)
            for value, sharding in zip(inputs, shardings, strict=True)
        ]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each result on all devices."""
        for line, value in zip(self.parameters, inputs, strict=True):
            shape = read_shape(line.shape)
            if (
                value.shape != (self.replicas * self.partitions, *shape.dims)
                or value.dtype != shape.dtype
            ):
                raise ValueError(
                    f"interpret: {line.name} is {line.shape} on each device, got"
                    f" {value.dtype}{list(value.shape)}."
                )
        return self._results(self.devices, inputs)

    def _results(self, devices: Devices, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self.exact:
            inputs = [value.astype(wide_float(value.dtype)) for value in inputs]
        self.computed = 0
        with np.errstate(all="ignore"):
            result = self.call(self.module.entry, devices, list(inputs))
        return list(result) if isinstance(result, tuple) else [result]

    def call(self, name: str, devices: Devices, arguments: Sequence[Value]) -> Value:
        """Return the result of a computation."""
        if name not in self._steps:
            self._steps[name] = self._build(name)
        steps, root = self._steps[name]
        values: list[Value] = []
        for step, places, instruction in steps:
            if places == (-1,):
                value = arguments[step(devices, [])]
            else:
                try:
                    value = step(devices, [values[place] for place in places])
                except CannotInterpretError:
                    raise
                except (ValueError, IndexError, TypeError, KeyError) as error:
                    raise CannotInterpretError(instruction, str(error)) from error
            values.append(value)
            self.computed += 0 if instruction.opcode in _PASSED else _size(value)
            if self.limit is not None and self.computed > self.limit:
                raise CannotInterpretError(
                    instruction, f"until then {self.computed:,} numbers are computed, too many"
                )
            if self.watch is not None:
                self.watch(name, instruction, value)
        return values[root]

    def _build(self, name: str) -> tuple[list[tuple[Step, tuple[int, ...], Instruction]], int]:
        lines = self.module.computations[name]
        place_of = {line.name: place for place, line in enumerate(lines)}
        steps = []
        for instruction in lines:
            names = (
                []
                if instruction.opcode in ("constant", "parameter", "iota")
                else operands(instruction)
            )
            if instruction.opcode == "parameter":
                index = int(operands(instruction)[0])
                steps.append((lambda devices, values, index=index: index, (-1,), instruction))
                continue
            try:
                places = tuple(place_of[operand] for operand in names)
                shapes = tuple(lines[place].shape for place in places)
                line = Line(instruction.opcode, instruction.shape, attributes(instruction), shapes)
                steps.append((self._step_of(instruction, line), places, instruction))
            except CannotInterpretError:
                raise
            except (ValueError, KeyError, IndexError) as error:
                raise CannotInterpretError(instruction, str(error)) from error
        root = next((place for place, line in enumerate(lines) if line.is_root), len(lines) - 1)
        return steps, root

    def _step_of(self, instruction: Instruction, line: Line) -> Step:
        wide = widened(line) if self.exact else line
        if wide == line or not line.reads_bits:
            return self._step(instruction, wide)
        step = self._step(instruction, line)  # a number has its bits in its own type
        source, target = line.operand(0).dtype, wide.result.dtype
        return lambda devices, values: step(devices, [values[0].astype(source)]).astype(target)

    def _step(self, instruction: Instruction, line: Line) -> Step:
        opcode = line.opcode
        if operation := elementwise(line) or shaped(line):
            return lambda devices, values: operation(*values)
        if opcode == "iota":
            numbers = iota(line)
            return lambda devices, values: numbers(len(devices.positions))
        if opcode == "constant":
            text = (
                instruction.rest.partition("), ")[0].rpartition(")")[0]
                or instruction.rest.partition(")")[0]
            )
            literal = read_literal(text, read_shape(instruction.shape)).astype(line.result.dtype)
            literal = (
                exact_reciprocals(literal) if self.exact and literal.dtype.kind == "f" else literal
            )
            if literal.ndim == 0:
                literal = np.array(self.moved.get(float(literal), literal), literal.dtype)
            return lambda devices, values: np.broadcast_to(
                literal, (len(devices.positions), *literal.shape)
            )
        builder = getattr(self, "_" + opcode.replace("-", "_"), None)
        if builder is None:
            raise ValueError(f"the opcode {opcode} is not interpreted")
        return builder(line)

    # tuples, calls and control flow

    def _tuple(self, line: Line) -> Step:
        return lambda devices, values: tuple(values)

    def _get_tuple_element(self, line: Line) -> Step:
        index = int(line.attributes["index"])
        return lambda devices, values: values[0][index]

    def _optimization_barrier(self, line: Line) -> Step:
        return lambda devices, values: values[0]

    _opt_barrier = _optimization_barrier

    def _after_all(self, line: Line) -> Step:
        return lambda devices, values: ()

    def _partition_id(self, line: Line) -> Step:
        return lambda devices, values: (devices.positions % self.partitions).astype(np.uint32)

    def _replica_id(self, line: Line) -> Step:
        return lambda devices, values: (devices.positions // self.partitions).astype(np.uint32)

    def _fusion(self, line: Line) -> Step:
        name = self._callee(line, "calls", "to_apply")
        return lambda devices, values: self.call(name, devices, values)

    _call = _fusion

    def _while(self, line: Line) -> Step:
        condition, body = (line.attributes[key].lstrip("%") for key in ("condition", "body"))

        def step(devices: Devices, values: list[Value]) -> Value:
            state = values[0]
            for _ in range(MAX_ITERATIONS):
                goes_on = np.asarray(self.call(condition, devices, [state]))
                if not goes_on.any():
                    return state
                if goes_on.all():
                    state = self.call(body, devices, [state])
                    continue
                rows = np.flatnonzero(goes_on)
                part = devices._replace(positions=devices.positions[rows])
                state = _put(state, rows, self.call(body, part, [_take(state, rows)]))
            raise ValueError(f"the loop turns more than {MAX_ITERATIONS} times")

        return step

    def _conditional(self, line: Line) -> Step:
        if "branch_computations" in line.attributes:
            branches = [
                name.strip(" %")
                for name in line.attributes["branch_computations"].strip("{}").split(",")
            ]
        else:
            branches = [
                line.attributes[key].lstrip("%")
                for key in ("true_computation", "false_computation")
            ]
        is_boolean = line.operand(0).dtype == np.bool_

        def step(devices: Devices, values: list[Value]) -> Value:
            which = (
                ~values[0] * 1
                if is_boolean
                else np.where(
                    (values[0] < 0) | (values[0] >= len(branches)), len(branches) - 1, values[0]
                )
            )
            result = None
            for branch in np.unique(which).tolist():
                rows = np.flatnonzero(which == branch)
                part = devices._replace(positions=devices.positions[rows])
                outcome = self.call(branches[branch], part, [_take(values[1 + branch], rows)])
                result = (
                    _spread_rows(outcome, rows, len(which))
                    if result is None
                    else _put(result, rows, outcome)
                )
            return result

        return step

    # reductions by a computation of two numbers

    def _callee(self, line: Line, *keys: str) -> str:
        return next(line.attributes[key] for key in keys if key in line.attributes).strip("{}% ")

    def _combiner(self, line: Line) -> str | None:
        """Return the opcode of a computation of two numbers; None if it is not one of `UFUNCS`."""
        lines = [
            instruction
            for instruction in self.module.computations[self._callee(line, "to_apply", "calls")]
            if instruction.opcode not in ("convert", "parameter", "custom-call")
        ]
        if len(lines) == 1 and lines[0].opcode in UFUNCS:
            return lines[0].opcode
        return "set" if not lines else None

    def _named_combiner(self, line: Line) -> str:
        name = self._combiner(line)
        if name is None:
            raise ValueError(
                f"its computation {line.attributes['to_apply']} is more than one of"
                f" {', '.join(sorted(UFUNCS))}"
            )
        return name

    def _scalars(self, name: str, values: Sequence[np.ndarray]) -> Value:
        """Apply a computation of single numbers to arrays: each place counts as a device of its
        own.
        """
        flat = [np.ascontiguousarray(value).reshape(-1) for value in values]
        result = self.call(name, Devices(np.arange(len(flat[0])), len(flat[0]), 1), flat)
        shape = values[0].shape
        return (
            tuple(part.reshape(shape) for part in result)
            if isinstance(result, tuple)
            else result.reshape(shape)
        )

    def _map(self, line: Line) -> Step:
        name = self._callee(line, "to_apply")
        return lambda devices, values: self._scalars(name, values)

    def _reduce(self, line: Line) -> Step:
        name, axes = (
            self._callee(line, "to_apply"),
            tuple(dim + 1 for dim in line.dims("dimensions")),
        )
        combiner, count = self._combiner(line), len(line.operand_shapes) // 2
        if count == 1 and combiner in UFUNCS:
            ufunc = UFUNCS[combiner]

            def direct(devices: Devices, values: list[Value]) -> Value:
                value, initial = values
                reduced = reduce_rows(ufunc, value, axes)
                return ufunc(
                    reduced, initial.reshape(len(initial), *(1,) * (reduced.ndim - 1))
                ).astype(value.dtype)

            return direct

        def fold(devices: Devices, values: list[Value]) -> Value:
            kept = [axis for axis in range(values[0].ndim) if axis not in axes]
            shape = tuple(values[0].shape[axis] for axis in kept)
            moved = [value.transpose(*kept, *axes).reshape(*shape, -1) for value in values[:count]]
            total = [
                np.broadcast_to(value.reshape(-1, *(1,) * (len(shape) - 1)), shape)
                for value in values[count:]
            ]
            for place in range(moved[0].shape[-1]):
                result = self._scalars(name, [*total, *(value[..., place] for value in moved)])
                total = list(result) if isinstance(result, tuple) else [result]
            return tuple(total) if count > 1 else total[0]

        return fold

    def _reduce_window(self, line: Line) -> Step:
        operation = reduce_window(line, self._named_combiner(line))
        return lambda devices, values: operation(*values)

    def _scatter(self, line: Line) -> Step:
        operation = scatter(line, self._named_combiner(line))
        return lambda devices, values: operation(*values)

    def _sort(self, line: Line) -> Step:
        """Sort by neighbours that change places, which is stable."""
        name, axis = self._callee(line, "to_apply"), line.dims("dimensions")[0] + 1

        def step(devices: Devices, values: list[Value]) -> Value:
            columns = [np.moveaxis(value, axis, -1).copy() for value in values]
            length = columns[0].shape[-1]
            for turn in range(length):
                left, right = slice(turn % 2, length - 1, 2), slice(turn % 2 + 1, length, 2)
                pairs = [
                    part for column in columns for part in (column[..., right], column[..., left])
                ]
                if pairs[0].size == 0:
                    continue
                swaps = self._scalars(name, pairs)
                for column in columns:
                    a, b = column[..., left].copy(), column[..., right].copy()
                    column[..., left], column[..., right] = (
                        np.where(swaps, b, a),
                        np.where(swaps, a, b),
                    )
            sorted_values = tuple(np.moveaxis(column, -1, axis) for column in columns)
            return sorted_values if line.shape.startswith("(") else sorted_values[0]

        return step

    def _topk(self, line: Line) -> Step:
        operation = CUSTOM_CALLS["TopK"](line)
        return lambda devices, values: operation(*values)

    def _custom_call(self, line: Line) -> Step:
        target = line.attributes.get("custom_call_target", "").strip('"')
        if target == "AllocateBuffer":
            shape = line.result
            return lambda devices, values: np.zeros(
                (len(devices.positions), *shape.dims), shape.dtype
            )
        if target in ("AssumeGatherIndicesInBound", "LayoutConstraint"):
            return lambda devices, values: values[0]
        if target not in CUSTOM_CALLS:
            raise ValueError(f"the custom call {target} is not interpreted")
        operation = CUSTOM_CALLS[target](line)
        return lambda devices, values: operation(*values)

    # collectives

    def _each(
        self, kind: str, line: Line, move: Callable[[np.ndarray, list[list[int]]], np.ndarray]
    ) -> Step:
        groups = collectives.groups_of(kind, line.attributes, self.devices)
        is_tuple = len(line.operand_shapes) > 1

        def step(devices: Devices, values: list[Value]) -> Value:
            rows = devices.rows(groups)
            results = tuple(move(value, rows) for value in values)
            return results if is_tuple else results[0]

        return step

    def _reduction(self, line: Line) -> collectives.Reduction:
        ufunc = UFUNCS[self._named_combiner(line)]
        return functools.partial(_reduce_first, ufunc)

    def _all_reduce(self, line: Line) -> Step:
        reduction = self._reduction(line)
        return self._each(
            "all-reduce", line, lambda value, rows: collectives.all_reduce(value, rows, reduction)
        )

    def _all_gather(self, line: Line) -> Step:
        dim = line.dims("dimensions")[0]
        return self._each(
            "all-gather", line, lambda value, rows: collectives.all_gather(value, rows, dim)
        )

    def _reduce_scatter(self, line: Line) -> Step:
        dim, reduction = line.dims("dimensions")[0], self._reduction(line)
        return self._each(
            "reduce-scatter",
            line,
            lambda value, rows: collectives.reduce_scatter(value, rows, dim, reduction),
        )

    def _all_to_all(self, line: Line) -> Step:
        if "dimensions" in line.attributes:
            dim = line.dims("dimensions")[0]
            return self._each(
                "all-to-all", line, lambda value, rows: collectives.all_to_all(value, rows, dim)
            )
        groups = collectives.groups_of("all-to-all", line.attributes, self.devices)
        return lambda devices, values: collectives.exchange(values, devices.rows(groups))

    def _ragged_all_to_all(self, line: Line) -> Step:
        groups = collectives.groups_of("ragged-all-to-all", line.attributes, self.devices)
        return lambda devices, values: collectives.ragged_all_to_all(values, devices.rows(groups))

    def _collective_broadcast(self, line: Line) -> Step:
        return self._each(
            "collective-broadcast",
            line,
            lambda value, rows: collectives.all_reduce(value, rows, lambda group: group[0]),
        )

    def _collective_permute(self, line: Line) -> Step:
        is_tuple = len(line.operand_shapes) > 1

        def step(devices: Devices, values: list[Value]) -> Value:
            results = tuple(
                collectives.permute(value, line.attributes, devices) for value in values
            )
            return results if is_tuple else results[0]

        return step


def _reduce_first(ufunc: Any, values: np.ndarray) -> np.ndarray:
    return reduce_rows(ufunc, values, 0)


def _size(value: Value) -> int:
    return sum(map(_size, value)) if isinstance(value, tuple) else value.size


def _take(value: Value, rows: np.ndarray) -> Value:
    return tuple(_take(part, rows) for part in value) if isinstance(value, tuple) else value[rows]


def _put(value: Value, rows: np.ndarray, update: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(_put(part, rows, new) for part, new in zip(value, update, strict=True))
    value = np.array(value)
    value[rows] = update
    return value


def _spread_rows(value: Value, rows: np.ndarray, count: int) -> Value:
    """Return a value of `count` devices with the given rows.

    The others are zero until they are put.
    """
    if isinstance(value, tuple):
        return tuple(_spread_rows(part, rows, count) for part in value)
    if len(rows) == count:
        return value
    result = np.zeros((count, *value.shape[1:]), value.dtype)
    result[rows] = value
    return result
