"""A block's forward, input gradient and weight gradient as three functions, with the residuals that pass between them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from shardopt.core.primitives import ARITHMETIC
from shardopt.core.types import abstract

Arrays = list[jax.Array]
Atom = jex.Var | jex.Literal
Shapes = Sequence[jax.Array | jax.ShapeDtypeStruct]
T = TypeVar("T")


class Passes(NamedTuple):
    """The passes of one block `f(given, x) -> y`; `given` are its weights, indices and the like.

    Two kinds of things are computed again where they are needed, and are no residuals: what depends on `given`
    alone (casts and gathers of weights, dropout masks), and what elementwise operations make of a residual. Inner
    products, reductions and all else are computed once.

    Attributes:
      forward: `forward(given, x) -> (y, residuals)`: what the later passes need of this one.
      backward: `backward(given, residuals, dy) -> (dx, deferred)`: the gradient of the input, and what `weight` needs
        of this pass, such as the cotangents of inner products.
      weight: `weight(given, [residuals[i] for i in weight_residuals], deferred) -> dw`: the gradient of the weights.
      both: `both(given, residuals, dy) -> (dx, dw)`: the last two in one.
      residuals: their shapes.
      deferred: the shapes of deferred.
      weight_residuals: which residuals `weight` reads.
    """

    forward: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
    backward: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weight: Callable[[Arrays, Arrays, Arrays], Arrays]
    both: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    deferred: tuple[jax.ShapeDtypeStruct, ...]
    weight_residuals: tuple[int, ...]


def split_backward(
    f: Callable[[Arrays, Arrays], Arrays], given: Shapes, x: Shapes, *, trained: Sequence[int]
) -> Passes:
    """Trace a block with its gradients, and cut the trace into `Passes`.

    `jax.vjp` keeps every intermediate result, its caller's weights among them, and computes both gradients at once.
    Here each equation of the trace is put into the first pass that cannot do without it, and what crosses from
    one pass to a later one is a residual. So the weight gradient can run later than the input gradient
    and repeat nothing of it: for y = g(x @ w), the cotangent of x @ w crosses, and the product with x waits.

    Args:
      f: the block, of lists of arrays. Integer leaves of x have no gradient: dy and dx are the floating ones only.
      given: weights and other arguments, or their shapes.
      x: the input, or its shapes; y has the same.
      trained: which of `given` the weight gradient is of.
    """
    moving = floating(x)

    def with_gradients(given: Arrays, x: Arrays, dy: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        def of(weights: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
            y = f(replaced(given, trained, weights), replaced(x, moving, inputs))
            return [y[i] for i in moving], y

        _, vjp, y = jax.vjp(of, [given[i] for i in trained], [x[i] for i in moving], has_aux=True)
        dw, dx = vjp(dy)
        return y, dx, dw

    given, x = abstract((list(given), list(x)))
    args = (given, x, [x[i] for i in moving])
    closed = jax.make_jaxpr(with_gradients)(*args)
    inlined = jax.make_jaxpr(lambda *args: _inlined(closed.jaxpr, closed.consts, jax.tree.leaves(args)))(*args)
    return _cut(inlined, len(given), len(x), len(trained))


def rematerialised(passes: Passes, x: Shapes) -> Passes:
    """Return passes that keep the input alone, and run the forward again in the backward pass; not in `weight`."""

    def backward(given: Arrays, x: Arrays, dy: Arrays) -> tuple[Arrays, Arrays]:
        _, residuals = passes.forward(given, x)
        dx, deferred = passes.backward(given, residuals, dy)
        return dx, [*deferred, *(residuals[i] for i in passes.weight_residuals)]

    def weight(given: Arrays, _: Arrays, deferred: Arrays) -> Arrays:
        count = len(passes.deferred)
        return passes.weight(given, deferred[count:], deferred[:count])

    return Passes(
        forward=lambda given, x: (passes.forward(given, x)[0], list(x)),
        backward=backward,
        weight=weight,
        both=lambda given, x, dy: passes.both(given, passes.forward(given, x)[1], dy),
        residuals=tuple(abstract(list(x))),
        deferred=(*passes.deferred, *(passes.residuals[i] for i in passes.weight_residuals)),
        weight_residuals=(),
    )


def floating(leaves: Shapes) -> list[int]:
    """Return which leaves have gradients."""
    return [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def replaced(leaves: Sequence[T], where: Sequence[int], new: Sequence[T]) -> list[T]:
    """Return the leaves with new ones in some places."""
    result = list(leaves)
    for i, leaf in zip(where, new, strict=True):
        result[i] = leaf
    return result


class _Trace(NamedTuple):
    jaxpr: jex.Jaxpr
    consts: Sequence[jax.Array]
    makes: dict[jex.Var, int]  # which equation


def _cut(closed: jex.ClosedJaxpr, num_given: int, num_x: int, num_trained: int) -> Passes:
    jaxpr = closed.jaxpr
    trace = _Trace(jaxpr, closed.consts, {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars})
    given, rest = jaxpr.invars[:num_given], jaxpr.invars[num_given:]
    x, dy = rest[:num_x], rest[num_x:]
    y, dx = jaxpr.outvars[:num_x], jaxpr.outvars[num_x : num_x + len(dy)]
    dw = jaxpr.outvars[len(jaxpr.outvars) - num_trained :]
    free = _reached(jaxpr, [*jaxpr.constvars, *given], every=True)
    late = _reached(jaxpr, dy, every=False)
    residuals = _residuals(trace, x, free, late, [*dx, *dw])
    # What has an effect is run once, as early as its arguments are there.
    effects = {i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects}
    early_effects = {i for i in effects if not _inputs(jaxpr.eqns[i]) & late}

    in_forward, _ = _slice(trace, [*y, *residuals], stop=set(x), extra=early_effects)
    in_both, _ = _slice(trace, [*dx, *dw], stop={*residuals, *dy}, extra=effects - early_effects)
    in_backward, _ = _slice(trace, dx, stop={*residuals, *dy}, extra=effects - early_effects)
    deferrable = {*dy, *(var for i in in_backward for var in jaxpr.eqns[i].outvars if var in late)}
    in_weight, crossing = _slice(trace, dw, stop={*residuals, *deferrable})
    deferred = [var for var in crossing if var in deferrable]
    residuals_of_weight = [var for var in crossing if var not in deferrable]

    forward = _part(trace, in_forward, [*given, *x], [*y, *residuals])
    backward = _part(trace, in_backward, [*given, *residuals, *dy], [*dx, *deferred])
    weight = _part(trace, in_weight, [*given, *residuals_of_weight, *deferred], dw)
    both = _part(trace, in_both, [*given, *residuals, *dy], [*dx, *dw])
    return Passes(
        forward=lambda given, x: _split(forward(*given, *x), num_x),
        backward=lambda given, residuals, dy: _split(backward(*given, *residuals, *dy), len(dy)),
        weight=lambda given, residuals, deferred: weight(*given, *residuals, *deferred),
        both=lambda given, residuals, dy: _split(both(*given, *residuals, *dy), len(dy)),
        residuals=tuple(map(_shape, residuals)),
        deferred=tuple(map(_shape, deferred)),
        weight_residuals=tuple(residuals.index(var) for var in residuals_of_weight),
    )


def _inlined(jaxpr: jex.Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array]) -> Arrays:
    """Evaluate equation by equation, and what stands in a `jit` as if it stood here: `jax.nn` is full of them."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda var: var.val if isinstance(var, jex.Literal) else values[var]  # noqa: E731
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "jit" and all(repr(s) == "UnspecifiedValue" for s in eqn.params["in_shardings"]):
            inner = eqn.params["jaxpr"]
            outputs = _inlined(inner.jaxpr, inner.consts, [read(var) for var in eqn.invars])
        else:
            names = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
            outputs = _part(_Trace(jaxpr, consts, {}), {i}, names, eqn.outvars)(*map(read, names))
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _reached(jaxpr: jex.Jaxpr, start: Iterable[jex.Var], *, every: bool) -> set[jex.Var]:
    """Return the variables computed from `start`: from it alone if `every`, else from any of it."""
    reached = set(start)
    for eqn in jaxpr.eqns:
        inputs = _inputs(eqn)
        if inputs <= reached if every else inputs & reached:
            reached |= set(eqn.outvars)
    return reached


def _inputs(eqn: jex.JaxprEqn) -> set[jex.Var]:
    return {var for var in eqn.invars if not isinstance(var, jex.Literal)}


def _slice(
    trace: _Trace, wanted: Iterable[Atom], *, stop: set[jex.Var], extra: Iterable[int] = ()
) -> tuple[set[int], list[jex.Var]]:
    """Return the equations that compute `wanted` from `stop`, and which of `stop` they read."""
    equations, read = set(extra), {}
    todo = [var for var in wanted if not isinstance(var, jex.Literal)]
    todo += [var for i in equations for var in _inputs(trace.jaxpr.eqns[i])]
    while todo:
        var = todo.pop()
        if var in stop:
            read[var] = None
        elif var in trace.makes and trace.makes[var] not in equations:
            equations.add(trace.makes[var])
            todo += _inputs(trace.jaxpr.eqns[trace.makes[var]])
    return equations, list(read)


def _part(
    trace: _Trace, equations: set[int], inputs: Sequence[jex.Var], outputs: Sequence[Atom]
) -> Callable[..., Arrays]:
    """Return the function that these equations are."""
    part = trace.jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=[trace.jaxpr.eqns[i] for i in sorted(equations)],
        debug_info=trace.jaxpr.debug_info.with_unknown_names(),
    )
    return lambda *args: jax.core.eval_jaxpr(part, trace.consts, *args)


def _split(values: Arrays, at: int) -> tuple[Arrays, Arrays]:
    return list(values[:at]), list(values[at:])


def _residuals(
    trace: _Trace, x: Sequence[jex.Var], free: set[jex.Var], late: set[jex.Var], gradients: Sequence[Atom]
) -> list[jex.Var]:
    """Return what to keep of the forward pass, for what the gradients, which wait for dy, read of it."""
    equations = trace.jaxpr.eqns
    needed, _ = _slice(trace, gradients, stop=set(x))
    waiting = [i for i in sorted(needed) if set(equations[i].outvars) & late]
    early = [equations[i] for i in sorted(needed.difference(waiting))]
    reads = [*gradients, *(var for i in waiting for var in _inputs(equations[i]))]
    return _fewest_bytes(early, x, free, [v for v in reads if not isinstance(v, jex.Literal) and v not in late])


# Arithmetic and what moves elements: compilers fuse them into whatever reads them. Whatever is not named here is kept.
_CHEAP = ARITHMETIC | frozenset(
    """broadcast_in_dim concatenate copy expand_dims iota name pad reshape rev slice split squeeze stop_gradient
    transpose""".split()  # noqa: SIM905
)
_MOST = 2**30


def _fewest_bytes(
    equations: Sequence[jex.JaxprEqn], start: Iterable[jex.Var], free: set[jex.Var], wanted: Iterable[jex.Var]
) -> list[jex.Var]:
    """Return the variables to keep, so that `wanted` can be computed from them by cheap equations alone.

    Every value that is dear to compute is a source, every wanted one a sink; a cheap equation passes from each input to
    each output whatever is not kept. A set of variables that stops all flow is what has to be kept, and the one of
    fewest bytes is a minimum vertex cut. Of several the one nearest to `wanted` is taken, which leaves the least to
    compute again.

    Args:
      equations: those that may be run, in order.
      start: variables that are there at first, and have to be kept if they are to be used.
      free: variables that are there in any case.
      wanted: variables computed by these equations, or among `start`.

    References:
      Ford and Fulkerson, 1956, for the cut; the same is done for rematerialisation by PyTorch's AOTAutograd (Horace He
      and Shangdi Yu, "Min-cut optimal recomputation", 2022).
    """
    wanted = [var for var in dict.fromkeys(wanted) if var not in free]
    if not wanted:
        return []
    variables = list(dict.fromkeys([*start, *(v for eqn in equations for v in eqn.outvars if v not in free)]))
    number = {var: i for i, var in enumerate(variables)}
    count = len(variables)
    source, sink = 2 * count, 2 * count + 1
    weights = [_bytes(var) for var in variables]
    unit = max(sum(weights) / (_MOST // 2), 1.0)
    edges: dict[tuple[int, int], int] = {}
    for i, weight in enumerate(weights):  # a variable is an edge from its own entry to its own exit
        edges[i, count + i] = max(math.ceil(weight / unit), 1)
    for var in start:
        edges[source, number[var]] = _MOST
    for eqn in equations:
        inputs = [number[v] for v in eqn.invars if not isinstance(v, jex.Literal) and v in number]
        dear = eqn.primitive.name not in _CHEAP or bool(eqn.effects)
        for var in eqn.outvars:
            if var in number:
                edges |= {(source, number[var]): _MOST} if dear else {(count + i, number[var]): _MOST for i in inputs}
    for var in wanted:
        edges[count + number[var], sink] = _MOST
    cut = _min_cut(edges, 2 * count + 2, source, sink)
    return [variables[i] for i in sorted(i for i, exit_ in cut if i < count and exit_ == count + i)]


def _min_cut(edges: dict[tuple[int, int], int], size: int, source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of the minimum cut nearest to the sink."""
    from scipy.sparse import csr_array  # 20 MB and a fifth of a second of import
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    ends = np.array(list(edges), np.int32)
    capacity = csr_array((np.array(list(edges.values()), np.int32), (ends[:, 0], ends[:, 1])), shape=(size, size))
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.eliminate_zeros()
    reaches_sink = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return [(a, b) for a, b in edges if a not in reaches_sink and b in reaches_sink]


def _bytes(var: jex.Var) -> int:
    shape = _shape(var)
    return math.prod(shape.shape) * shape.dtype.itemsize


def _shape(var: jex.Var) -> jax.ShapeDtypeStruct:
    aval = var.aval
    assert isinstance(aval, jax.core.ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
