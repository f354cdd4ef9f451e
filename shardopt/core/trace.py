"""Cutting a trace: which of its equations compute what from what, as functions of their own."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import numpy as np

Arrays = list[jax.Array]
Atom = jex.Var | jex.Literal
MOST = 2**30
"""A capacity above any that `min_cut` is given."""


class Trace(NamedTuple):
    """A trace.

    Attributes:
      jaxpr: its equations.
      consts: the values that it closes over.
      makes: by which equation a variable is made.
    """

    jaxpr: jex.Jaxpr
    consts: Sequence[jax.Array]
    makes: dict[jex.Var, int]


def trace_of(closed: jex.ClosedJaxpr) -> Trace:
    """Return what `jax.make_jaxpr` returns as a trace."""
    makes = {var: i for i, eqn in enumerate(closed.jaxpr.eqns) for var in eqn.outvars}
    return Trace(closed.jaxpr, closed.consts, makes)


def inlined(
    jaxpr: jex.Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array], *, keep: Collection[str] = ()
) -> Arrays:
    """Evaluate equation by equation, and what stands in a `jit` as if it stood here: `jax.nn` is full of them.

    Functions whose name is among `keep` stay calls.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda var: var.val if isinstance(var, jex.Literal) else values[var]  # noqa: E731
    for i, eqn in enumerate(jaxpr.eqns):
        is_jit = eqn.primitive.name == "jit" and eqn.params["name"] not in keep
        if is_jit and all(repr(s) == "UnspecifiedValue" for s in eqn.params["in_shardings"]):
            inner = eqn.params["jaxpr"]
            outputs = inlined(inner.jaxpr, inner.consts, [read(var) for var in eqn.invars], keep=keep)
        else:
            names = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
            outputs = part_of(Trace(jaxpr, consts, {}), {i}, names, eqn.outvars)(*map(read, names))
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def inputs_of(eqn: jex.JaxprEqn) -> set[jex.Var]:
    """Return the variables that an equation reads."""
    return {var for var in eqn.invars if not isinstance(var, jex.Literal)}


def slice_of(
    trace: Trace, wanted: Iterable[Atom], *, stop: set[jex.Var], extra: Iterable[int] = ()
) -> tuple[set[int], list[jex.Var]]:
    """Return the equations that compute `wanted` from `stop`, and which of `stop` they read."""
    equations, read = set(extra), {}
    todo = [var for var in wanted if not isinstance(var, jex.Literal)]
    todo += [var for i in equations for var in inputs_of(trace.jaxpr.eqns[i])]
    while todo:
        var = todo.pop()
        if var in stop:
            read[var] = None
        elif var in trace.makes and trace.makes[var] not in equations:
            equations.add(trace.makes[var])
            todo += inputs_of(trace.jaxpr.eqns[trace.makes[var]])
    return equations, list(read)


def part_of(
    trace: Trace, equations: set[int], inputs: Sequence[jex.Var], outputs: Sequence[Atom]
) -> Callable[..., Arrays]:
    """Return the function that these equations are."""
    part = trace.jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=[trace.jaxpr.eqns[i] for i in sorted(equations)],
        debug_info=trace.jaxpr.debug_info.with_unknown_names(),
    )
    return lambda *args: jax.core.eval_jaxpr(part, trace.consts, *args)


def min_cut(edges: dict[tuple[int, int], int], size: int, source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of the minimum cut nearest to the sink."""
    reaches_sink = sink_side(edges, size, source, sink)
    return [(a, b) for a, b in edges if a not in reaches_sink and b in reaches_sink]


def sink_side(edges: dict[tuple[int, int], int], size: int, source: int, sink: int) -> set[int]:
    """Return the nodes on the sink's side of that cut."""
    from scipy.sparse import csr_array  # 20 MB and a fifth of a second of import
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    ends = np.array(list(edges), np.int32)
    capacity = csr_array((np.array(list(edges.values()), np.int32), (ends[:, 0], ends[:, 1])), shape=(size, size))
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.eliminate_zeros()
    return set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())


def bytes_of(var: Atom) -> int:
    """Return the bytes of a value."""
    shape = shape_of(var)
    return math.prod(shape.shape) * shape.dtype.itemsize


def shape_of(var: Atom) -> jax.ShapeDtypeStruct:
    """Return its shape and dtype."""
    aval = var.aval
    assert isinstance(aval, jax.core.ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
