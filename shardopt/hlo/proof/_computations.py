"""Walk through a program and derive every value: fusions, calls, loops and branches are opened."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardopt.hlo._collective import Groups, permute_pairs, replica_groups
from shardopt.hlo._hlo_text import array_shape, elements
from shardopt.hlo._walk import KINDS, branches_of
from shardopt.hlo.proof import _collectives, _indexing, _rules
from shardopt.hlo.proof._convolution import convolution
from shardopt.hlo.proof._cublas import Gemm, read_gemm
from shardopt.hlo.proof._interpret_numpy import UFUNCS, reduce_rows
from shardopt.hlo.proof._lines import Line, combiner, major_to_minor
from shardopt.hlo.proof._lookup import noted
from shardopt.hlo.proof._neighbours import block_of, window
from shardopt.hlo.proof._numbers import evaluate, iota, known, literal
from shardopt.hlo.proof._opened import THROUGH
from shardopt.hlo.proof._parts import BY_ELEMENT, along, by_parts
from shardopt.hlo.proof._value import (
    DerivedValue,
    Facts,
    Fault,
    Hidden,
    RuleError,
    Unproved,
    is_whole,
    joined,
    merged_hidden,
    mixed,
    replaced,
    same_everywhere,
    used,
    whole,
    without_known_devices,
)
from shardopt.trace._primitives import words

Result = Any
"""A `DerivedValue`, or a tuple of results."""

MAX_TURNS = 12
_UNNOTED = words("fusion get-tuple-element while conditional optimization-barrier opt-barrier call")
_IN_ORDER = (
    BY_ELEMENT
    | _UNNOTED
    | words("reshape bitcast transpose slice broadcast parameter")
    | words("reduce-scatter all-reduce collective-permute")
)
"""These keep the elements of an array in their order."""
_MOVES = ("collective-permute", "slice", "copy", THROUGH)
"""These hand on some elements of an array."""


@dataclass
class Derivation:
    """The derivation of one program.

    Attributes:
      computations: the lines of each computation.
      replicas: the number of replicas.
      partitions: the number of partitions.
      known: the results of computations, by their names and arguments.
      sums_of_constants: the names of reductions of numbers that follow from no argument and are
        the same on all devices.
    """

    computations: dict[str, tuple[Line, ...]]
    replicas: int
    partitions: int
    known: dict[tuple[str, tuple[Result, ...]], Result] = field(default_factory=dict)
    sums_of_constants: dict[str, None] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.partitions

    def run(self, name: str, arguments: tuple[Result, ...]) -> Result:
        """Return the result of a computation for its arguments."""
        # Facts about the arguments decide the facts about the result, so equal calls are derived
        # once.
        key = (name, arguments)
        if key not in self.known:
            self.known[key] = self._run(name, arguments)
        return self.known[key]

    def _run(self, name: str, arguments: tuple[Result, ...]) -> Result:
        values: dict[str, Result] = {}
        lines = {line.name: line for line in self.computations[name]}
        result: Result = ()
        for line in lines.values():
            if line.opcode == "parameter":
                values[line.name] = arguments[int(line.literal)]
            else:
                values[line.name] = self.line(line, [values[name] for name in line.operands])
            # After its own rule: only if that found no layout, pieces of neighbours may explain it.
            if line.opcode == "concatenate":
                values[line.name] = self._joined(line, lines, values)
            if line.is_root:
                result = values[line.name]
        return result

    def line(self, line: Line, operands: Sequence[Result]) -> Result:
        """Return the result of one instruction; a fault, if it is wrong or no rule covers it."""

        def evaluate():
            result = self._line(line, operands)
            if isinstance(result, DerivedValue) and line.opcode not in _IN_ORDER:
                result = _reordered(result)
            if isinstance(result, DerivedValue) and line.opcode not in _UNNOTED:
                return noted(line, [o for o in operands if isinstance(o, DerivedValue)], result)
            return result

        try:
            return _or_fault(line, line.shape, evaluate)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            reason = f"the rule of {line.opcode} does not cover this form of it ({error!r})."
            return faulty(line.shape, frozenset([Fault(False, line.order, reason)]))

    def _line(self, line: Line, operands: Sequence[Result]) -> Result:
        opcode = line.opcode
        if opcode in ("tuple", "after-all"):
            return tuple(operands)
        if opcode == "get-tuple-element":
            return (
                operands[0][int(line.attributes["index"])]
                if isinstance(operands[0], tuple)
                else operands[0]
            )
        if opcode in ("optimization-barrier", "opt-barrier"):
            return operands[0]
        if opcode in ("fusion", "call"):
            return self.run(line.callee, tuple(operands))
        if opcode == "while":
            return self._while(line, operands[0])
        if opcode == "conditional":
            return self._conditional(line, operands)
        if opcode in _SOURCES:
            return _SOURCES[opcode](line)
        if opcode in ("partition-id", "replica-id"):
            # devices are numbered replica by replica
            replica, partition = np.divmod(np.arange(self.devices), self.partitions)
            ids = partition if opcode == "partition-id" else replica
            return known(ids.astype(np.uint32), line)
        if opcode in KINDS:
            return self._collective(line, opcode, operands)
        # Before the faults of the operand: as a whole the interval has none, and only this slice
        # uses it.
        if opcode == "dynamic-slice" and (interval := operands[0].facts.interval) is not None:
            return block_of(line, interval, operands[1:])
        faults = _faults(operands)
        if faults:
            return faulty(line.shape, faults)
        return self._local(line, list(operands))

    def _local(self, line: Line, operands: list[DerivedValue]) -> Result:
        opcode = line.opcode
        if any(not isinstance(operand, DerivedValue) for operand in operands):
            raise Unproved(f"no rule covers {opcode} of a tuple.")
        if opcode in ("sort", "reduce", "custom-call", "rng-bit-generator", "scatter") and any(
            o.parts for o in operands
        ):
            raise Unproved(f"no rule covers {opcode} of a bucket of pieces with different layouts.")
        if opcode == "sort":
            return line.results(_indexing.along_whole(line, operands, line.integers("dimensions")))
        if opcode == "custom-call":
            return self._custom_call(line, operands)
        if opcode == "reduce":
            return self._reduce(line, operands)
        if opcode == "scatter":
            return _indexing.scatter(line, operands, self.reduction(line))
        return apply(line, operands)

    def reduction(self, line: Line) -> str | None:
        """Return by which opcode an instruction reduces, such as `add`; None for other functions."""
        called = self.computations.get(line.callee)
        opcode = None if called is None else combiner(called)
        return None if opcode == "set" else opcode

    def _reduce(self, line: Line, operands: list[DerivedValue]) -> Result:
        kind = self.reduction(line)
        half = len(operands) // 2
        if half == 1 and kind is not None:
            value, initial = operands
            if value.data is not None and initial.data is not None and kind in UFUNCS:
                axes = tuple(dim + 1 for dim in line.integers("dimensions"))
                ufunc = UFUNCS[kind]
                return known(reduce_rows(ufunc, value.data.array, axes, initial.data.array), line)
            value = _rules.reduce(line, value, initial, kind)
            return _settled(value, operands)
        removed = line.integers("dimensions")
        values = _indexing.along_whole(line, operands[:half], removed)
        remaining = values[0].other_dims(removed)
        shape = tuple(values[0].shape[i] for i in remaining)
        dims = tuple(values[0].dims[i] for i in remaining)
        return line.results([DerivedValue(shape, dims, value.hidden) for value in values])

    def _custom_call(self, line: Line, operands: list[DerivedValue]) -> Result:
        target = line.target
        if target in _IDENTITIES:
            return operands[0]
        if target == "TopK":
            return self._of_whole_dims(line, operands, 1)
        if target == "AllocateBuffer":  # the program writes all of it before it reads it
            return self._allocated(line.dims)
        gemm = read_gemm(line.attributes)
        if gemm:
            return self._gemm(line, gemm, operands)
        if target.startswith("lapack_") or target in ("Cholesky", "Qr", "Eigh"):
            return self._of_whole_dims(line, operands, 2)
        is_kernel = target == "tpu_custom_call"
        if is_kernel and '"has_communication":true' not in line.arguments.replace(" ", ""):
            rank = max(len(operand.shape) for operand in operands)
            return self._of_whole_dims(line, operands, rank)
        raise Unproved(f"no rule covers the custom call {target}.")

    def _gemm(self, line: Line, gemm: Gemm, operands: list[DerivedValue]) -> Result:
        shape, *workspaces = elements(line.shape)
        array = line._replace(shape=shape)
        lhs, rhs, *addends = operands
        value = _rules.product(array, lhs, rhs, gemm.batch, gemm.contracting)
        if gemm.bias:
            last = array._replace(
                attributes={"dimensions": f"{{{len(value.shape) - 1}}}"}, opcode="broadcast"
            )
            addends[-1] = apply(last, addends[-1:])
        for other in addends:
            value = apply(array._replace(opcode="add"), [value, other])
        if gemm.function:
            value = apply(array._replace(opcode="tanh"), [value])
        empty = [self._allocated(array_shape(workspace)) for workspace in workspaces]
        return line.results([_settled(value, operands), *empty])

    def _allocated(self, shape: tuple[int, ...]) -> DerivedValue:
        dims = tuple(same_everywhere(size, self.devices) for size in shape)
        return DerivedValue(shape, dims, constant=True, fill=0)

    def _of_whole_dims(self, line: Line, operands: list[DerivedValue], count: int) -> Result:
        """Return a function of the last dims, which are whole; the dims before are a batch.

        TopK reads one dim, decompositions two. A kernel reads all dims, and
        its devices may have their own elements of other dims.
        """
        rank = max(len(operand.shape) for operand in operands)
        batch = next(operand for operand in operands if len(operand.shape) == rank)
        if not all(is_whole(dim) for operand in operands for dim in operand.dims[-count:]):
            raise Unproved("it mixes the elements of dims of which each device holds a piece.")
        hidden = mixed(operands, line.order)
        results = []
        for shape in elements(line.shape):
            sizes = array_shape(shape)
            dims = tuple(
                (
                    batch.dims[i]
                    if i < rank - count and size == batch.shape[i]
                    else whole(size, self.devices)
                )
                for i, size in enumerate(sizes)
            )
            results.append(DerivedValue(sizes, dims, hidden))
        return line.results(results)

    # pieces of neighbours

    def _joined(
        self, line: Line, lines: dict[str, Line], values: dict[str, Result]
    ) -> DerivedValue:
        """Return a concatenation, with the interval that each device joins if its pieces are of one
        value.
        """
        result, (dim,) = values[line.name], line.integers("dimensions")
        if _faults([values[name] for name in line.operands]) or not (result.faults or result.parts):
            return result
        names, senders, starts = zip(
            *(self._piece(name, dim, lines) for name in line.operands), strict=True
        )
        value = values[names[0]]
        sizes = [lines[name].dims[dim] for name in line.operands]
        if len(set(names)) > 1 or not isinstance(value, DerivedValue):
            return result
        interval = window(value, dim, np.stack(senders), np.array(starts), np.array(sizes))
        return result._replace(facts=Facts(interval=interval))

    def _piece(self, name: str, dim: int, lines: dict[str, Line]) -> tuple[str, np.ndarray, int]:
        """Return the name of the value that an operand is a piece of, the devices that send it, and
        where it starts.
        """
        senders = np.arange(self.devices)
        start = 0
        while len((line := lines[name]).operands) == 1 and line.opcode in _MOVES:
            if line.opcode == "collective-permute":
                senders = np.where(senders < 0, -1, self._senders(line)[senders])
            elif line.opcode == "slice":
                if any(stride != 1 for *_, stride in line.bounds):
                    break
                start += line.bounds[dim][0]
            name = line.operands[0]
        return name, senders, start

    # loops and branches

    def _while(self, line: Line, initial: Result) -> Result:
        body, condition = (line.attributes[key].strip(" %") for key in ("body", "condition"))
        state = initial
        # The loop ends at a fixed point: each turn joins the carry with the body's result, so facts
        # only weaken.
        for _ in range(MAX_TURNS):
            following = join(state, self.run(body, (state,)), line)
            if following == state:
                break
            state = following
        else:
            raise Unproved("what the loop carries reaches no fixed point.")
        # devices that leave the loop after different numbers of turns hold different things
        return _chosen_by(self.run(condition, (state,)), state, line)

    def _conditional(self, line: Line, operands: Sequence[Result]) -> Result:
        index, *inputs = operands
        branches = zip(branches_of(line.attributes), inputs, strict=True)
        results = [self.run(name, (operand,)) for name, operand in branches]
        # Facts that hold in every branch, since which one a device takes is not known.
        return _chosen_by(index, functools.reduce(lambda a, b: join(a, b, line), results), line)

    # collectives

    def _groups(self, line: Line) -> Groups:
        return replica_groups(line.opcode, line.attributes, self.replicas, self.partitions)

    def _collective(self, line: Line, kind: str, operands: Sequence[Result]) -> Result:
        if kind == "all-to-all" and "dimensions" not in line.attributes:
            return self._tuple_all_to_all(line, operands)
        if kind == "collective-permute" and len(operands) != 1:
            raise Unproved("no rule covers a permute in place.")
        if kind in ("collective-broadcast", "ragged-all-to-all"):
            raise Unproved(f"no rule covers {kind}.")
        results = []
        for shape, operand in zip(elements(line.shape), operands, strict=True):
            if not isinstance(operand, DerivedValue):
                raise Unproved(f"no rule covers {kind} of a tuple.")
            rule = functools.partial(self._one_collective, line, kind, operand)
            results.append(
                faulty(shape, operand.faults) if operand.faults else _or_fault(line, shape, rule)
            )
        return line.results(results)

    def _one_collective(self, line: Line, kind: str, value: DerivedValue) -> DerivedValue:
        if kind == "collective-permute":
            senders = self._senders(line)
            return self._by_part(
                value, lambda part: _collectives.permuted(part, senders, line.order)
            )
        groups = self._groups(line)
        reduced = functools.partial(self._reduced, line, groups)
        if kind == "all-reduce":
            return self._by_part(value, reduced)
        (dim,) = line.integers("dimensions")
        if value.parts and dim == along(value):
            raise Unproved(f"{kind} along the dim in which a bucket joins its pieces.")
        rules = {
            "all-gather": lambda part: _collectives.gathered(part, dim, groups),
            "all-to-all": lambda part: _exchanged(part, dim, groups, major_to_minor(line.shape)),
            "reduce-scatter": lambda part: _collectives.block(
                reduced(part), dim, _collectives.position_in_group(groups), len(groups[0])
            ),
        }
        return self._by_part(value, rules[kind])

    def _senders(self, line: Line) -> np.ndarray:
        """Return from which device each device receives; -1 for none."""
        senders = np.full(self.devices, -1)
        for sender, receiver in permute_pairs(line.attributes, self.replicas, self.partitions):
            senders[receiver] = sender
        return senders

    def _reduced(self, line: Line, groups: Groups, value: DerivedValue) -> DerivedValue:
        result = _collectives.reduced_over(value, self.reduction(line) or "?", groups, line.order)
        # A count of rows, for example: whether a sum of equal numbers is meant, no rule can tell.
        if value.constant and not value.hidden and not value.zero and len(groups[0]) > 1:
            self.sums_of_constants[line.name] = None
        return result

    def _by_part(self, value: DerivedValue, rule: Any) -> DerivedValue:
        if not value.parts:
            return rule(value)
        dim = along(value)
        parts = tuple(map(rule, value.parts))
        return DerivedValue(replaced(parts[0].shape, dim, value.shape[dim]), parts=parts)

    def _tuple_all_to_all(self, line: Line, operands: Sequence[DerivedValue]) -> Result:
        faults = _faults(operands)
        if faults:
            return faulty(line.shape, faults)
        if any(operand.parts for operand in operands):
            return self._exchanged_buckets(line, operands)
        groups = self._groups(line)
        common, values = _rules.unified_operands(operands)
        kinds = {(h.kind, h.at) for value in values for h in value.hidden}
        if any({(h.kind, h.at) for h in value.hidden} != kinds for value in values):
            raise Unproved("it exchanges arrays of different layouts.")
        n = len(operands)
        hidden = merged_hidden(value.hidden for value in values)
        stacked = DerivedValue((n, *operands[0].shape), (whole(n, self.devices), *common), hidden)
        received = _collectives.exchanged(stacked, 0, groups)
        element = DerivedValue(operands[0].shape, received.dims[1:], received.hidden)
        return (element,) * n

    def _exchanged_buckets(self, line: Line, operands: Sequence[DerivedValue]) -> Result:
        """Return the result of an exchange of buckets, each piece with the same piece of the others."""
        buckets = [operand.parts or () for operand in operands]
        if len({tuple(part.shape for part in parts) for parts in buckets}) > 1:
            raise Unproved("devices send each other buckets of different pieces.")
        exchanged = [self._tuple_all_to_all(line, pieces) for pieces in zip(*buckets, strict=True)]
        return tuple(operands[0]._replace(parts=parts) for parts in zip(*exchanged, strict=True))


_IDENTITIES = words(
    "Sharding MoveToHost MoveToDevice annotate_device_placement LayoutConstraint"
    " AssumeGatherIndicesInBound"
)


_SOURCES = {"constant": literal, "iota": iota}
_RULES = {
    **_rules.RULES,
    "dynamic-slice": _indexing.dynamic_slice,
    "dynamic-update-slice": _indexing.dynamic_update_slice,
    "gather": _indexing.gather,
    "convolution": convolution,
}


def apply(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the value of a local instruction with one array as its result."""
    data = evaluate(line, values)
    if data is not None:
        return known(data, line)
    if any(value.parts for value in values):
        return by_parts(line, values, apply)
    rule = _RULES.get(line.opcode)
    if rule is None:
        raise Unproved(f"no rule covers {line.opcode}.")
    return _settled(rule(line, values), values)


def _settled(value: DerivedValue, operands: Sequence[DerivedValue]) -> DerivedValue:
    """Return a result with whether it is a constant, without what its other coordinates imply."""
    constant = all(operand.constant for operand in operands)
    return without_known_devices(value._replace(constant=constant))


def _exchanged(
    value: DerivedValue, dim: int, groups: Groups, order: tuple[int, ...]
) -> DerivedValue:
    """Return the result of an all-to-all of an array in memory, where an element of a dim is to the
    left of others.
    """
    stored = _collectives.exchanged(_rules.transposed(value, order), order.index(dim), groups)
    return _rules.transposed(stored, tuple(map(order.index, range(len(order)))))


def _reordered(value: DerivedValue) -> DerivedValue:
    """Return a value of whose hidden dims the place in the array is unknown."""
    if all(h.minor < 0 for h in value.hidden):
        return value
    return value._replace(hidden=tuple(h._replace(minor=-1) for h in value.hidden))


def _or_fault(line: Line, shape: str, rule: Callable[[], Result]) -> Result:
    """Return the result of a rule; a fault, if the line is wrong or the rule does not cover it."""
    try:
        return rule()
    except RuleError as problem:
        fault = Fault(problem.is_wrong, line.order, problem.reason, problem.groups)
    return faulty(shape, frozenset([fault]))


def faulty(shape: str, faults: frozenset[Fault]) -> Result:
    """Return a result whose every array has these faults."""
    if shape.startswith("("):
        return tuple(faulty(part, faults) for part in elements(shape))
    return DerivedValue(array_shape(shape), faults=faults)


def _faults(operands: Sequence[Result]) -> frozenset[Fault]:
    return frozenset[Fault]().union(*(value.faults for value in flat(tuple(operands))))


def flat(result: Result) -> list[DerivedValue]:
    """Return the arrays of a result, also in nested tuples."""
    if isinstance(result, DerivedValue):
        return [result]
    return [value for part in result for value in flat(part)]


def join(first: Result, second: Result, line: Line) -> Result:
    """Return what holds for both of two results."""
    if not isinstance(first, DerivedValue):
        return tuple(join(a, b, line) for a, b in zip(first, second, strict=True))
    try:
        return joined(first, second)
    except Unproved as problem:
        return first._replace(faults=frozenset([Fault(False, line.order, problem.reason)]))


def _chosen_by(choice: DerivedValue, result: Result, line: Line) -> Result:
    """Return the result of a loop or conditional, whose turns or branch devices choose."""
    if choice.faults:
        return faulty(line.shape, choice.faults)
    hidden = used(choice.hidden, line.order)
    return _with_hidden(result, hidden) if hidden else result


def _with_hidden(result: Result, hidden: tuple[Hidden, ...]) -> Result:
    if not isinstance(result, DerivedValue):
        return tuple(_with_hidden(part, hidden) for part in result)
    if result.faults:
        return result._replace(facts=Facts())
    return without_known_devices(result.changed(hidden=merged_hidden([result.hidden, hidden])))
