"""Evaluate a trace operation by operation, and follow NaN and infinities back to the operation that made them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardopt.trace._jaxprs import called_jaxprs, jaxpr_params
from shardopt.trace._parts import Trace, part_of
from shardopt.trace._walk import scan_parts, while_parts

MOVES = frozenset(
    """broadcast_in_dim select_n reshape transpose squeeze expand_dims slice dynamic_slice concatenate pad gather rev copy
    convert_element_type stop_gradient reduce_max reduce_min max min device_put optimization_barrier""".split()  # noqa: SIM905
)
"""Operations whose results are values of their operands, such as the -inf of a mask."""

Turns = tuple[tuple[int, int], ...]
"""(turn, number of turns) of each loop around an operation, the outermost first; 0 turns if the number is unknown."""


class Origin(NamedTuple):
    """The origin of a value that is not finite.

    Attributes:
      is_nan: whether the value is NaN; otherwise it is infinite.
      order: when it was found; operations count from 1, arguments and constants are 0.
      eqn: the operation that made it; None if it is an argument or a constant.
      argument: the index of the argument that holds it, or None.
      turns: the turns of the loops around the operation.
      leaf: the index of the parameter that was read last on the way to it, or None.
      cause: the origin of the infinity that the operation made NaN of, or None.
    """

    is_nan: bool
    order: int = 0
    eqn: JaxprEqn | None = None
    argument: int | None = None
    turns: Turns = ()
    leaf: int | None = None
    cause: Optional["Origin"] = None

    @property
    def is_made(self) -> bool:
        """Whether an operation or the user made it: a constant of the program may be infinite on purpose."""
        return self.eqn is not None or self.argument is not None


class Value(NamedTuple):
    """A value of the trace.

    Attributes:
      array: the numbers.
      origin: the origin of a number that is not finite; None if all are finite.
      leaf: the index of the parameter that was read last on the way to it, or None.
      read: when it was read.
      is_leaf: whether the value is this parameter itself, or a part of it.
    """

    array: jax.Array
    origin: Origin | None = None
    leaf: int | None = None
    read: int = 0
    is_leaf: bool = False


def first_origin(closed: ClosedJaxpr, args: Sequence[jax.Array], num_leaves: int) -> Origin | None:
    """Return the origin of the earliest value that makes a result not finite; None if all results are finite.

    Operations run one by one. A loop or a call that gives a result that is not finite is opened; loops are unrolled. What is
    not finite but leaves no trace in the results, such as the -inf of a mask, is no origin.

    Args:
      closed: the trace.
      args: its arguments.
      num_leaves: the first so many arguments are parameters.
    """
    values = []
    for i, array in enumerate(args):
        any_nan, any_bad = _flags(array)
        origin = Origin(any_nan, argument=i) if any_bad else None
        values.append(Value(array, origin, i, 0, True) if i < num_leaves else Value(array, origin))
    origins = [value.origin for value in _Evaluation().run(closed, values, ()) if value.origin is not None]
    return min(origins, key=_preference) if origins else None


def _preference(origin: Origin) -> tuple[bool, bool, int]:
    """Return a key that is smallest for the origin to follow: values that an operation made before constants, NaN before infinities, then the first."""
    return not origin.is_made, not origin.is_nan, origin.order


def _flags(array: jax.Array) -> tuple[bool, bool]:
    """Return whether an array has a NaN, and whether it has a NaN or an infinity."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return False, False
    numbers = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        numbers = numbers.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)  # 8-bit floats
    return bool(np.isnan(numbers).any()), not np.isfinite(numbers).all()


@dataclasses.dataclass
class _Evaluation:
    """One evaluation.

    Attributes:
      count: the number of operations that ran.
    """

    count: int = 0

    def run(self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Value], turns: Turns) -> list[Value]:
        """Return the results of a function."""
        opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        consts = jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()
        known = dict(zip(opened.constvars, map(_constant, consts), strict=True))
        known |= dict(zip(opened.invars, operands, strict=True))
        read = lambda atom: _constant(atom.val) if isinstance(atom, Literal) else known[atom]  # noqa: E731
        for i, eqn in enumerate(opened.eqns):
            operands = list(map(read, eqn.invars))
            known |= dict(zip(eqn.outvars, self.equation(opened, i, operands, turns), strict=True))
        return list(map(read, opened.outvars))

    def equation(self, jaxpr: Jaxpr, index: int, operands: list[Value], turns: Turns) -> list[Value]:
        """Return the results of an equation; if they are not finite, open the functions that it calls."""
        eqn = jaxpr.eqns[index]
        self.count += 1
        variables = {var: x.array for var, x in zip(eqn.invars, operands, strict=True) if not isinstance(var, Literal)}
        arrays = part_of(Trace(jaxpr, (), {}), {index}, list(variables), eqn.outvars)(*variables.values())
        leaf, read = self.last_leaf(operands)
        flags = [_flags(array) for array in arrays]
        if any(any_bad for _, any_bad in flags) and (results := self.open(eqn, operands, turns)) is not None:
            return results
        return [
            Value(array, self.origin(eqn, any_nan, operands, turns, leaf) if any_bad else None, leaf, read)
            for array, (any_nan, any_bad) in zip(arrays, flags, strict=True)
        ]

    def last_leaf(self, operands: Sequence[Value]) -> tuple[int | None, int]:
        """Return the parameter that an operation reads, or else the one that was read last for an operand, and when."""
        leaves = [(self.count if x.is_leaf else x.read, x.leaf) for x in operands if x.leaf is not None]
        read, leaf = max(leaves, default=(0, None))
        return leaf, read

    def origin(self, eqn: JaxprEqn, is_nan: bool, operands: Sequence[Value], turns: Turns, leaf: int | None) -> Origin:
        """Return the origin of a result that is not finite: the origin of an operand, or this operation."""
        origins = sorted((x.origin for x in operands if x.origin is not None), key=_preference)
        passed = [origin for origin in origins if origin.is_nan or not is_nan]
        if passed and (passed[0].is_made or eqn.primitive.name in MOVES):
            return passed[0]
        made_infinities = [origin for origin in origins if origin.is_made]
        cause = made_infinities[0] if is_nan and made_infinities else None
        return Origin(is_nan, self.count, eqn, None, turns, leaf, cause)

    def open(self, eqn: JaxprEqn, operands: list[Value], turns: Turns) -> list[Value] | None:
        """Return the results of what an equation calls, operation by operation; None if it calls nothing that can be opened."""
        name, functions = eqn.primitive.name, jaxpr_params(eqn)
        if name == "scan":
            return self.scan(eqn, operands, turns)
        if name == "while":
            return self.while_loop(eqn, operands, turns)
        if name == "cond":
            branches = eqn.params["branches"]
            index = int(np.clip(int(operands[0].array), 0, len(branches) - 1))
            return self.run(branches[index], operands[1:], turns)
        counts = [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in called_jaxprs(eqn)]
        has_axes = name == "shard_map" or "pallas" in name
        if has_axes or not counts or counts[0] != (len(operands), len(eqn.outvars)):
            return None
        return self.run(functions[0], operands, turns)

    def scan(self, eqn: JaxprEqn, operands: list[Value], turns: Turns) -> list[Value]:
        """Return the results of a scan, turn by turn."""
        consts, carry, scanned = scan_parts(eqn, operands)
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        stacked: dict[int, list[Value]] = {}
        for turn in range(length)[:: -1 if eqn.params["reverse"] else 1]:
            slices = [x._replace(array=x.array[turn]) for x in scanned]
            slices = [x._replace(origin=x.origin if _flags(x.array)[1] else None) for x in slices]
            results = self.run(body, [*consts, *carry, *slices], (*turns, (turn, length)))
            carry, stacked[turn] = results[: len(carry)], results[len(carry) :]
        columns = zip(*(stacked[turn] for turn in range(length)), strict=True)
        return [*carry, *map(_stack, columns)]

    def while_loop(self, eqn: JaxprEqn, operands: list[Value], turns: Turns) -> list[Value]:
        """Return the results of a `while` loop, turn by turn."""
        cond_consts, body_consts, carry = while_parts(eqn, operands)
        turn = 0
        while self.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry], turns)[0].array:
            carry = self.run(eqn.params["body_jaxpr"], [*body_consts, *carry], (*turns, (turn, 0)))
            turn += 1
        return list(carry)


def _constant(value: object) -> Value:
    array = jnp.asarray(value)
    any_nan, any_bad = _flags(array)
    return Value(array, Origin(any_nan) if any_bad else None)


def _stack(values: Sequence[Value]) -> Value:
    origins = [value.origin for value in values if value.origin is not None]
    last = max(values, key=lambda value: value.read)
    array = jnp.stack([value.array for value in values])
    return Value(array, min(origins, key=_preference) if origins else None, last.leaf, last.read)
