"""Look at every result of a trace, operation by operation, and follow NaN and infinities back to
the operation that made them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardopt.core import Arrays, is_inexact, is_key
from shardopt.trace._jaxprs import CHECKPOINTS, constants_of, jaxpr_params, open_jaxpr
from shardopt.trace._parts import Trace, inputs_of, part_of
from shardopt.trace._walk import Equations, Walk, scan_parts, while_parts

MOVES = frozenset(
    """broadcast_in_dim select_n reshape transpose squeeze expand_dims slice dynamic_slice concatenate pad gather rev copy
    convert_element_type stop_gradient reduce_max reduce_min max min device_put optimization_barrier""".split()  # noqa: SIM905
)
"""Operations whose results are values of their operands, such as the -inf of a mask."""

CALLS = frozenset(
    """pjit jit closed_call core_call remat named_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr""".split()  # noqa: SIM905
) | frozenset(CHECKPOINTS)
"""Operations that call their first function with their operands."""

Turns = tuple[tuple[int, int], ...]
"""(turn, number of turns) of each loop around an operation, the outermost first; 0 turns if the
number is unknown.
"""


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
        """Whether an operation or the user made it: a constant of the program may be infinite on
        purpose.
        """
        return self.eqn is not None or self.argument is not None


class Value(NamedTuple):
    """A value of the trace.

    Attributes:
      array: the numbers, of jax or numpy.
      origin: the origin of a number that is not finite; None if all are finite.
      leaf: the index of the parameter that was read last on the way to it, or None.
      read: when it was read.
      is_leaf: whether the value is this parameter itself, or a part of it.
    """

    array: Any
    origin: Origin | None = None
    leaf: int | None = None
    read: int = 0
    is_leaf: bool = False


def first_origin(closed: ClosedJaxpr, args: Sequence[jax.Array], num_leaves: int) -> Origin | None:
    """Return the origin of the earliest value that makes a result not finite.

    None if all results are finite.

    One compiled program gives the results of all operations. A loop or branch that gives a result
    that is not finite is opened: its body is a program of its own, and runs turn by turn. An
    infinity that leaves no trace in the results, such as the -inf of a mask, is no origin.

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
    origins = [
        value.origin for value in _Evaluation().run(closed, values, ()) if value.origin is not None
    ]
    return min(origins, key=_preference) if origins else None


def _preference(origin: Origin) -> tuple[bool, bool, int]:
    """Return a key that is smallest for the origin to follow: values that an operation made before
    constants, NaN before infinities, then the first.
    """
    return not origin.is_made, not origin.is_nan, origin.order


def _flags(array: jax.Array) -> tuple[bool, bool]:
    """Return whether an array has a NaN, and whether it has a NaN or an infinity."""
    if not is_inexact(array):
        return False, False
    numbers = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        # 8-bit floats
        numbers = numbers.astype(
            np.float64 if array.dtype == np.float64 else np.float32, copy=False
        )
    return bool(np.isnan(numbers).any()), not np.isfinite(numbers).all()


@dataclasses.dataclass
class _Evaluation:
    """One evaluation.

    Attributes:
      count: the number of operations that were looked at.
      programs: the compiled function of each body, by the id of its jaxpr: from operands to the
        results of all equations.
    """

    count: int = 0
    programs: dict[int, Callable[..., list[Arrays]]] = dataclasses.field(default_factory=dict)

    def run(
        self, jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[Value], turns: Turns
    ) -> list[Value]:
        """Return the results of a function.

        It is compiled once, with the results of all its operations.
        """
        if id(jaxpr) not in self.programs:

            def evaluate(*arrays):
                return _results(jaxpr, arrays)[1]

            self.programs[id(jaxpr)] = jax.jit(evaluate, compiler_options=quick_compilation())
        results = iter(self.programs[id(jaxpr)](*(operand.array for operand in operands)))

        def equation(walk: Walk[Value], eqns: Equations, operands: list[Value]) -> list[Value]:
            (eqn,) = eqns
            callee = _callee(eqn)
            if callee is not None:
                return walk.follow([callee], operands)
            return self.equation(eqn, operands, next(results), turns)

        walk = Walk(equation, _constant, _constant, different=Value(None), join=_one_program)
        return walk.follow([jaxpr], operands)

    def equation(
        self, eqn: JaxprEqn, operands: list[Value], arrays: Sequence[jax.Array], turns: Turns
    ) -> list[Value]:
        """Return the results of an equation, which are `arrays`.

        If they are not finite, open a loop or branch.
        """
        self.count += 1
        leaf, read = self.last_leaf(operands)
        flags = [_flags(array) for array in arrays]
        if (
            any(any_bad for _, any_bad in flags)
            and (results := self.open(eqn, operands, turns)) is not None
        ):
            return results
        return [
            Value(
                array,
                self.origin(eqn, any_nan, operands, turns, leaf) if any_bad else None,
                leaf,
                read,
            )
            for array, (any_nan, any_bad) in zip(arrays, flags, strict=True)
        ]

    def last_leaf(self, operands: Sequence[Value]) -> tuple[int | None, int]:
        """Return the parameter that an operation reads, or else the one that was read last for an
        operand, and when.
        """
        leaves = [
            (self.count if x.is_leaf else x.read, x.leaf) for x in operands if x.leaf is not None
        ]
        read, leaf = max(leaves, default=(0, None))
        return leaf, read

    def origin(
        self, eqn: JaxprEqn, is_nan: bool, operands: Sequence[Value], turns: Turns, leaf: int | None
    ) -> Origin:
        """Return the origin of a result that is not finite: the origin of an operand, or this
        operation.
        """
        origins = sorted((x.origin for x in operands if x.origin is not None), key=_preference)
        passed = [origin for origin in origins if origin.is_nan or not is_nan]
        if passed and (passed[0].is_made or eqn.primitive.name in MOVES):
            return passed[0]
        made_infinities = [origin for origin in origins if origin.is_made]
        cause = made_infinities[0] if is_nan and made_infinities else None
        return Origin(is_nan, self.count, eqn, None, turns, leaf, cause)

    def open(self, eqn: JaxprEqn, operands: list[Value], turns: Turns) -> list[Value] | None:
        """Return the results of a loop or branch, operation by operation.

        None for other equations.
        """
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, operands, turns)
        if name == "while":
            return self.while_loop(eqn, operands, turns)
        if name == "cond":
            branches = eqn.params["branches"]
            index = int(np.clip(int(operands[0].array), 0, len(branches) - 1))
            return self.run(branches[index], operands[1:], turns)
        return None

    def scan(self, eqn: JaxprEqn, operands: list[Value], turns: Turns) -> list[Value]:
        """Return the results of a scan, turn by turn."""
        consts, carry, scanned = scan_parts(eqn, operands)
        length = eqn.params["length"]
        body = eqn.params["jaxpr"]
        stacked: dict[int, list[Value]] = {}
        # each slice of an array on a device is a program of its own
        arrays = [_on_host(x.array) for x in scanned]
        for turn in range(length)[:: -1 if eqn.params["reverse"] else 1]:
            slices = [
                x._replace(array=array[turn]) for x, array in zip(scanned, arrays, strict=True)
            ]
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


def _results(
    jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[jax.Array]
) -> tuple[list[Any], list[Arrays]]:
    """Return the results of a function, and of all its equations: an equation that calls a function
    gives those inside.
    """
    opened = open_jaxpr(jaxpr)
    consts = constants_of(jaxpr)
    known: dict[Any, Any] = dict(zip(opened.constvars, consts, strict=True))
    known |= dict(zip(opened.invars, operands, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    all_results: list[Arrays] = []
    for i, eqn in enumerate(opened.eqns):
        callee = _callee(eqn)
        if callee is not None:
            arrays, inner_results = _results(callee, list(map(read, eqn.invars)))
            all_results += inner_results
        else:
            variables = list(inputs_of(eqn))
            arrays = part_of(Trace(opened, consts, {}), {i}, variables, eqn.outvars)(
                *map(read, variables)
            )
            all_results.append(list(arrays))
        known |= dict(zip(eqn.outvars, arrays, strict=True))
    return list(map(read, opened.outvars)), all_results


def _callee(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """Return the function that an equation calls; None if it calls none, or is a loop or branch."""
    return jaxpr_params(eqn)[0] if eqn.primitive.name in CALLS else None


def quick_compilation() -> dict[str, int | bool]:
    """Return options with which XLA compiles faster: each program runs a few times."""
    if jax.local_devices()[0].platform != "cpu":
        return {}
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _one_program(first: Value, second: Value) -> Value:
    raise AssertionError("one branch runs, and loops turn by turn, so no values are joined")


def _constant(values: Sequence[object]) -> Value:
    (value,) = values
    array = jnp.asarray(value)
    any_nan, any_bad = _flags(array)
    return Value(array, Origin(any_nan) if any_bad else None)


def _on_host(array: Any) -> Any:
    """Return an array as numpy; random keys stay as they are."""
    return array if is_key(array) else np.asarray(array)


def _stack(values: Sequence[Value]) -> Value:
    origins = [value.origin for value in values if value.origin is not None]
    last = max(values, key=lambda value: value.read)
    arrays = [_on_host(value.array) for value in values]
    array: Any = np.stack(arrays) if isinstance(arrays[0], np.ndarray) else jnp.stack(arrays)
    return Value(array, min(origins, key=_preference) if origins else None, last.leaf, last.read)
