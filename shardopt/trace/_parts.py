"""Cut a trace into parts: find the equations that compute given values, and turn them into
functions.
"""

import math
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import numpy as np

from shardopt.trace._jaxprs import shape_of
from shardopt.trace._marks import has_mark

Shapes = Sequence[jax.Array | jax.ShapeDtypeStruct]
Atom = jex.Var | jex.Literal
MOST = 2**30
"""The capacity of edges that must not be cut: larger than the sum of all others."""


class Trace(NamedTuple):
    """A traced function.

    Attributes:
      jaxpr: the equations.
      consts: the values that the function closes over.
      producers: variable -> the index of the equation that computes it.
    """

    jaxpr: jex.Jaxpr
    consts: Sequence[jax.Array]
    producers: dict[jex.Var, int]


def trace_of(closed: jex.ClosedJaxpr) -> Trace:
    """Return the result of `jax.make_jaxpr` as a `Trace`."""
    producers = {var: i for i, eqn in enumerate(closed.jaxpr.eqns) for var in eqn.outvars}
    return Trace(closed.jaxpr, closed.consts, producers)


def inlined(
    jaxpr: jex.Jaxpr,
    consts: Sequence[jax.Array],
    args: Sequence[jax.Array],
    *,
    keep: Collection[str] = (),
) -> list[jax.Array]:
    """Evaluate a jaxpr equation by equation, with the bodies of inner `jit` calls inlined (`jax.nn`
    has many of them).

    Calls of marked functions whose kind is in `keep` are not inlined.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var):
        return var.val if isinstance(var, jex.Literal) else values[var]

    for i, eqn in enumerate(jaxpr.eqns):
        is_inlined = eqn.primitive.name == "jit" and not any(has_mark(eqn, kind) for kind in keep)
        if is_inlined and all(repr(s) == "UnspecifiedValue" for s in eqn.params["in_shardings"]):
            inner = eqn.params["jaxpr"]
            outputs = inlined(
                inner.jaxpr, inner.consts, [read(var) for var in eqn.invars], keep=keep
            )
        elif eqn.primitive.name == "reshard":
            # jnp.where reshards numbers made under another mesh. On Auto axes it changes nothing,
            # and a trace without mesh lacks it.
            outputs = [read(eqn.invars[0])]
        else:
            variables = variables_of(eqn.invars)
            outputs = part_of(Trace(jaxpr, consts, {}), {i}, variables, eqn.outvars)(
                *map(read, variables)
            )
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def variables_of(atoms: Iterable[Atom]) -> list[jex.Var]:
    """Return the atoms that are variables."""
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def inputs_of(eqn: jex.JaxprEqn) -> KeysView[jex.Var]:
    """Return the variables that an equation reads, in its order.

    The hashes of variables differ between processes.
    """
    return dict.fromkeys(variables_of(eqn.invars)).keys()


def slice_of(
    trace: Trace, wanted: Iterable[Atom], *, stop: set[jex.Var], extra: Iterable[int] = ()
) -> tuple[set[int], list[jex.Var]]:
    """Return the indices of the equations that compute `wanted` from the variables `stop`, and the
    `stop` that they read.
    """
    equations = set(extra)
    stops_read = {}
    pending = variables_of(wanted)
    pending += [var for i in equations for var in inputs_of(trace.jaxpr.eqns[i])]
    while pending:
        var = pending.pop()
        if var in stop:
            stops_read[var] = None
        elif var in trace.producers and trace.producers[var] not in equations:
            equations.add(trace.producers[var])
            pending += inputs_of(trace.jaxpr.eqns[trace.producers[var]])
    return equations, list(stops_read)


def reached_from(jaxpr: jex.Jaxpr, start: Iterable[jex.Var], *, every: bool) -> set[jex.Var]:
    """Return the variables that are computed from `start`: from `start` alone if `every`, else from
    any part of it.
    """
    reached = set(start)
    for eqn in jaxpr.eqns:
        inputs = inputs_of(eqn)
        if inputs <= reached if every else inputs & reached:
            reached |= set(eqn.outvars)
    return reached


def part_of(
    trace: Trace, equations: set[int], inputs: Sequence[jex.Var], outputs: Sequence[Atom]
) -> Callable[..., list[jax.Array]]:
    """Return a function that evaluates these equations, from `inputs` to `outputs`."""
    jaxpr = jaxpr_of_part(trace, equations, inputs, outputs)
    return lambda *args: jax.core.eval_jaxpr(jaxpr, trace.consts, *args)


def jaxpr_of_part(
    trace: Trace, equations: Iterable[int], inputs: Sequence[jex.Var], outputs: Sequence[Atom]
) -> jex.Jaxpr:
    """Return these equations as a jaxpr with the constants of the trace."""
    return trace.jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=[trace.jaxpr.eqns[i] for i in sorted(equations)],
        debug_info=trace.jaxpr.debug_info.with_unknown_names(),
    )


def fewest_bytes(
    variables: Sequence[jex.Var],
    sources: Iterable[jex.Var],
    arcs: Iterable[tuple[jex.Var, jex.Var]],
    sinks: Iterable[jex.Var],
    *,
    earliest: bool = False,
) -> list[jex.Var]:
    """Return the variables of fewest bytes on all ways from sources to sinks: a minimum vertex cut.

    Args:
      variables: all variables.
      sources: where ways start.
      arcs: pairs of neighbours on a way.
      sinks: where ways end.
      earliest: whether to return, of equal cuts, the one nearest to the sources; else to the sinks.

    References:
      Ford and Fulkerson, 1956; the same is done for rematerialisation by PyTorch's AOTAutograd
      (Horace He and Shangdi Yu, "Min-cut optimal recomputation", 2022).
    """
    index_of = {var: i for i, var in enumerate(variables)}
    count = len(index_of)
    source = 2 * count
    sink = 2 * count + 1
    # scipy counts in int32. In this unit all variables together stay below `MOST`, so no minimum
    # cut contains an edge of that capacity.
    unit = max(sum(map(bytes_of, variables)) / (MOST // 2), 1.0)
    # a variable is an edge from its entry node to its exit node
    edges = {(i, count + i): max(math.ceil(bytes_of(var) / unit), 1) for var, i in index_of.items()}
    edges |= {(source, index_of[var]): MOST for var in sources}
    # source -> [a in] -bytes of a-> [a out] -MOST-> [b in] -bytes of b-> [b out] -> sink
    #
    # Only edges through a variable can be cut. So a cut of edges is a choice of variables to store.
    edges |= {(count + index_of[start], index_of[end]): MOST for start, end in arcs}
    edges |= {(count + index_of[var], sink): MOST for var in sinks}
    if earliest:
        # The cut nearest to the sources is the one nearest to the sink if all ways run backwards.
        flipped = {(end, start): capacity for (start, end), capacity in edges.items()}
        reaches_source = sink_side(flipped, 2 * count + 2, sink, source)
        is_cut = [i in reaches_source and count + i not in reaches_source for i in range(count)]
    else:
        reaches_sink = sink_side(edges, 2 * count + 2, source, sink)
        is_cut = [i not in reaches_sink and count + i in reaches_sink for i in range(count)]
    return [var for var, cut in zip(index_of, is_cut, strict=True) if cut]


def sink_side(edges: dict[tuple[int, int], int], size: int, source: int, sink: int) -> set[int]:
    """Return the nodes on the sink's side of the minimum cut nearest to the sink."""
    from scipy.sparse import csr_array  # imported here, because it takes 20 MB and 0.2 seconds
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    ends = np.array(list(edges), np.int32)
    capacity = csr_array(
        (np.array(list(edges.values()), np.int32), (ends[:, 0], ends[:, 1])), shape=(size, size)
    )
    residual = capacity - maximum_flow(capacity, source, sink).flow
    residual.eliminate_zeros()
    # The flow is the largest, so no way with capacity left leads from the source to the sink. The
    # nodes that still reach the sink are the smallest side that a minimum cut leaves to it.
    return set(breadth_first_order(residual.T.tocsr(), sink, return_predecessors=False).tolist())


def bytes_of(var: Atom) -> int:
    """Return the number of bytes of a value."""
    shape = abstract_value(var)
    return math.prod(shape.shape) * shape.dtype.itemsize


def product_flops(product: jex.JaxprEqn) -> float:
    """Return the multiplications and additions of a `dot_general`."""
    (summed_dims, _), _ = product.params["dimension_numbers"]
    depth = math.prod(shape_of(product.invars[0])[dim] for dim in summed_dims)
    return 2.0 * math.prod(shape_of(product.outvars[0])) * depth


def abstract_value(var: Atom) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a value, which must be an array."""
    aval = var.aval
    assert isinstance(aval, jax.core.ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
