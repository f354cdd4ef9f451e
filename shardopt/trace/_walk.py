"""The walk of analyses over a trace, or over several traces of one function side by side.

An analysis gives every variable a value: the leaves that it follows from, or how it differs between
two traces. The walk reads and binds variables, and opens calls, branches and loops. The rules of
primitives belong to the analysis.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardopt.trace._jaxprs import called_jaxprs, constants_of, jaxpr_params, open_jaxpr, scan_carry

V = TypeVar("V")
Jaxprs = Sequence[ClosedJaxpr | Jaxpr]
"""One function, traced once or several times."""
Atoms = tuple[Var | Literal, ...]
"""An operand, as it is in each trace."""
Equations = tuple[JaxprEqn, ...]
"""One equation, as it is in each trace."""


@dataclasses.dataclass(frozen=True)
class Walk(Generic[V]):
    """The rules of an analysis.

    Attributes:
      equation: `equation(walk, equations, operands)` returns the values of an equation's results.
      constant: the value of a constant, from its value in each trace.
      literal: the value of a literal, from its value in each trace.
      different: the value of a variable for which the traces differ.
      join: the value of a variable that is one of two.
      same: whether a turn of a loop leaves a value of the carry as it is.
    """

    equation: "Callable[[Walk[V], Equations, list[V]], list[V]]"
    constant: Callable[[Sequence[Any]], V]
    literal: Callable[[Sequence[Any]], V]
    different: V
    join: Callable[[V, V], V]
    same: Callable[[V, V], bool] = operator.eq

    def follow(self, jaxprs: Jaxprs, operands: Sequence[V]) -> list[V]:
        """Return the values of the results of a function, from the values of its operands."""
        opened = [open_jaxpr(jaxpr) for jaxpr in jaxprs]
        sizes = {(len(x.invars), len(x.constvars), len(x.eqns), len(x.outvars)) for x in opened}
        different_results = [self.different] * len(opened[0].outvars)
        if len(sizes) > 1:
            return different_results
        known: dict[Atoms, V] = {}

        def bind(variables: Iterable[Sequence[Var]], values: Iterable[V]) -> None:
            known.update(zip(_side_by_side(variables), values, strict=True))

        constants = _side_by_side(map(constants_of, jaxprs))
        bind((x.constvars for x in opened), map(self.constant, constants))
        bind((x.invars for x in opened), operands)
        read = functools.partial(self.read, known)
        for eqns in _side_by_side(x.eqns for x in opened):
            if len({(eqn.primitive, len(eqn.invars), len(eqn.outvars)) for eqn in eqns}) > 1:
                return different_results
            operands = list(map(read, _side_by_side(eqn.invars for eqn in eqns)))
            bind((eqn.outvars for eqn in eqns), self.equation(self, eqns, operands))
        return list(map(read, _side_by_side(x.outvars for x in opened)))

    def read(self, known: Mapping[Atoms, V], atoms: Atoms) -> V:
        """Return the value of the operand of an equation, a variable or a literal in each trace."""
        literals = [atom.val for atom in atoms if isinstance(atom, Literal)]
        if not literals:
            return known.get(atoms, self.different)
        return self.literal(literals) if len(literals) == len(atoms) else self.different

    def call(self, eqns: Equations, operands: Sequence[V]) -> list[V] | None:
        """Return the values of the results of a call.

        None if the equations do not call one function of these operands.
        """
        jaxprs = [jaxpr for eqn in eqns for jaxpr in jaxpr_params(eqn)]
        counts = [len(called.invars) for eqn in eqns for called in called_jaxprs(eqn)]
        return self.follow(jaxprs, operands) if counts == [len(operands)] * len(eqns) else None

    def branches(self, eqns: Equations, operands: Sequence[V]) -> list[V]:
        """Return the values of the results of a `cond`, whichever branch it takes.

        `operands` are without the index.
        """
        branches = _side_by_side(eqn.params["branches"] for eqn in eqns)
        results = [self.follow(branch, operands) for branch in branches]
        return [functools.reduce(self.join, values) for values in _side_by_side(results)]

    def loop(
        self, bodies: Jaxprs, consts: Sequence[V], carry: Sequence[V], scanned: Sequence[V] = ()
    ) -> tuple[list[V], list[V]]:
        """Return the values of the carry that hold before every turn of a loop, and of the other
        results of a turn. A turn no longer changes the carry, joined with all carries before it.
        """
        while True:
            results = self.follow(bodies, [*consts, *carry, *scanned])
            joined = list(map(self.join, carry, results))
            if all(map(self.same, carry, joined)):
                return joined, results[len(joined) :]
            carry = joined


def _side_by_side(of_traces: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Return the first of each trace, then the second of each, and so on."""
    return zip(*of_traces, strict=True)


def scan_parts(
    eqn: JaxprEqn, operands: Sequence[V]
) -> tuple[Sequence[V], Sequence[V], Sequence[V]]:
    """Return the constants, the carry and the scanned operands of a scan."""
    num_carry, num_consts = scan_carry(eqn, eqn.params["jaxpr"].jaxpr)
    first_scanned = num_consts + num_carry
    return operands[:num_consts], operands[num_consts:first_scanned], operands[first_scanned:]


def while_parts(
    eqn: JaxprEqn, operands: Sequence[V]
) -> tuple[Sequence[V], Sequence[V], Sequence[V]]:
    """Return the constants of the condition, the constants of the body and the carry of a `while`
    loop.
    """
    first = eqn.params["cond_nconsts"]
    first_carry = first + eqn.params["body_nconsts"]
    return operands[:first], operands[first:first_carry], operands[first_carry:]
