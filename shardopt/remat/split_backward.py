"""A block's forward, input gradient and weight gradient as three functions, with what passes between them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from shardopt.core.types import abstract

# What to keep of a computation so that the rest follows from it cheaply, in the fewest bytes: a minimum cut.


# Elementwise and moving primitives: compilers fuse them into whatever reads them. Whatever is not named here is kept.
_CHEAP = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast_in_dim cbrt ceil clamp concatenate
    convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota
    is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg not one_minus_square or pad polynomial pow real
    reduce_precision rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    squeeze stop_gradient sub tan tanh transpose xor""".split()  # noqa: SIM905
)
_MOST = 2**30


def fewest_bytes(equations: Sequence[Any], start: Iterable[Any], free: set[Any], wanted: Iterable[Any]) -> list[Any]:
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
    kept = _min_cut(edges, 2 * count + 2, source, sink)
    return [variables[i] for i in sorted(i for i, exit_ in kept if i < count and exit_ == count + i)]


def _min_cut(edges: dict[tuple[int, int], int], size: int, source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of the minimum cut nearest to the sink."""
    from scipy.sparse import csr_array  # 20 MB and a fifth of a second, for zero-bubble schedules alone
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    ends = np.array(list(edges), np.int32)
    capacity = csr_array((np.array(list(edges.values()), np.int32), (ends[:, 0], ends[:, 1])), shape=(size, size))
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.eliminate_zeros()
    reaches_sink = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return [(a, b) for a, b in edges if a not in reaches_sink and b in reaches_sink]


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


Arrays = list[Any]


class Passes(NamedTuple):
    """One block `f(given, x) -> y`, taken apart; `given` are its weights, indices and the like.

    Two kinds of things are computed again where they are needed, so that they need not be kept: what depends on `given`
    alone (casts and gathers of weights, dropout masks), and what elementwise operations make of something kept. Inner
    products, reductions and all else are computed once.

    Attributes:
      forward: `forward(given, x) -> (y, kept)`: kept is what the later passes need of this one.
      backward: `backward(given, kept, dy) -> (dx, deferred)`: the gradient of the input, and what `weight` needs of
        this pass, such as the cotangents of inner products.
      weight: `weight(given, [kept[i] for i in weight_keeps], deferred) -> dw`: the gradient of the weights.
      both: `both(given, kept, dy) -> (dx, dw)`: the last two in one.
      kept: the shapes of kept.
      deferred: the shapes of deferred.
      weight_keeps: which of kept `weight` reads.
    """

    forward: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
    backward: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weight: Callable[[Arrays, Arrays, Arrays], Arrays]
    both: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    deferred: tuple[jax.ShapeDtypeStruct, ...]
    weight_keeps: tuple[int, ...]


def split_backward(
    f: Callable[[Arrays, Arrays], Arrays], given: Arrays, x: Arrays, *, trained: Sequence[int]
) -> Passes:
    """Trace a block with its gradients, and cut the trace into `Passes`.

    `jax.vjp` keeps every intermediate result, its caller's weights among them, and computes both gradients at once.
    The trace shows more: each equation is put into the first pass that cannot do without it, and what crosses from
    one pass to a later one is what has to be kept. So the weight gradient can run later than the input gradient
    and repeat nothing of it: for y = g(x @ w), the cotangent of x @ w crosses, and the product with x waits.

    Args:
      f: the block, of lists of arrays. Integer leaves of x have no gradient: dy and dx are the floating ones only.
      given: weights and other arguments, or their shapes.
      x: the input, or its shapes; y has the same.
      trained: which of `given` the weight gradient is of.
    """
    moving = floating(x)

    def with_gradients(given, x, dy):
        def of(weights, inputs):
            here, there = replaced(given, trained, weights), replaced(x, moving, inputs)
            y = f(here, there)
            return [y[i] for i in moving], y

        _, vjp, y = jax.vjp(of, [given[i] for i in trained], [x[i] for i in moving], has_aux=True)
        dw, dx = vjp(dy)
        return y, dx, dw

    given, x = abstract((list(given), list(x)))
    args = (given, x, [x[i] for i in moving])
    closed = jax.make_jaxpr(with_gradients)(*args)
    inlined = jax.make_jaxpr(lambda *args: _inlined(closed.jaxpr, closed.consts, jax.tree.leaves(args)))(*args)
    return _cut(inlined, len(given), len(x), len(trained))


def rematerialised(passes: Passes, x: Sequence[Any]) -> Passes:
    """Return passes that keep the input alone, and run the forward again in the backward pass; not in `weight`."""

    def backward(given, kept, dy):
        _, again = passes.forward(given, kept)
        dx, deferred = passes.backward(given, again, dy)
        return dx, [*deferred, *(again[i] for i in passes.weight_keeps)]

    def weight(given, _, deferred):
        count = len(passes.deferred)
        return passes.weight(given, deferred[count:], deferred[:count])

    return Passes(
        forward=lambda given, x: (passes.forward(given, x)[0], list(x)),
        backward=backward,
        weight=weight,
        both=lambda given, kept, dy: passes.both(given, passes.forward(given, kept)[1], dy),
        kept=tuple(x),
        deferred=(*passes.deferred, *(passes.kept[i] for i in passes.weight_keeps)),
        weight_keeps=(),
    )


def floating(leaves: Sequence[Any]) -> list[int]:
    """Return which leaves have gradients."""
    return [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def replaced(leaves: Sequence[Any], where: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the leaves with new ones in some places."""
    result = list(leaves)
    for i, leaf in zip(where, new, strict=True):
        result[i] = leaf
    return result


def _cut(closed: Any, num_given: int, num_x: int, num_trained: int) -> Passes:
    jaxpr, consts = closed.jaxpr, closed.consts
    given, rest = jaxpr.invars[:num_given], jaxpr.invars[num_given:]
    x, dy = rest[:num_x], rest[num_x:]
    y, dx = jaxpr.outvars[:num_x], jaxpr.outvars[num_x : num_x + len(dy)]
    dw = jaxpr.outvars[len(jaxpr.outvars) - num_trained :]
    makes = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    free = _reached(jaxpr, [*jaxpr.constvars, *given], every=True)
    late = _reached(jaxpr, dy, every=False)
    kept = _kept(jaxpr, makes, x, free, late, [*dx, *dw])
    # What has an effect is run once, as early as its arguments are there.
    effects = {i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects}
    early_effects = {i for i in effects if not _inputs(jaxpr.eqns[i]) & late}

    in_forward, _ = _slice(jaxpr, makes, [*y, *kept], stop=set(x), extra=early_effects)
    in_both, _ = _slice(jaxpr, makes, [*dx, *dw], stop={*kept, *dy}, extra=effects - early_effects)
    in_backward, _ = _slice(jaxpr, makes, dx, stop={*kept, *dy}, extra=effects - early_effects)
    deferrable = {*dy, *(var for i in in_backward for var in jaxpr.eqns[i].outvars if var in late)}
    in_weight, crossing = _slice(jaxpr, makes, dw, stop={*kept, *deferrable})
    deferred = [var for var in crossing if var in deferrable]
    kept_of_weight = [var for var in crossing if var not in deferrable]

    forward = _part(jaxpr, consts, in_forward, [*given, *x], [*y, *kept])
    backward = _part(jaxpr, consts, in_backward, [*given, *kept, *dy], [*dx, *deferred])
    weight = _part(jaxpr, consts, in_weight, [*given, *kept_of_weight, *deferred], dw)
    both = _part(jaxpr, consts, in_both, [*given, *kept, *dy], [*dx, *dw])
    shape = lambda var: jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)  # noqa: E731
    return Passes(
        forward=lambda given, x: _split(forward(*given, *x), num_x),
        backward=lambda given, kept, dy: _split(backward(*given, *kept, *dy), len(dy)),
        weight=lambda given, kept, deferred: weight(*given, *kept, *deferred),
        both=lambda given, kept, dy: _split(both(*given, *kept, *dy), len(dy)),
        kept=tuple(shape(var) for var in kept),
        deferred=tuple(shape(var) for var in deferred),
        weight_keeps=tuple(kept.index(var) for var in kept_of_weight),
    )


def _inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate equation by equation, and what stands in a `jit` as if it stood here: `jax.nn` is full of them."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for i, eqn in enumerate(jaxpr.eqns):
        inputs = [var.val if isinstance(var, jex.Literal) else values[var] for var in eqn.invars]
        if eqn.primitive.name == "jit" and all(repr(s) == "UnspecifiedValue" for s in eqn.params["in_shardings"]):
            inner = eqn.params["jaxpr"]
            outputs = _inlined(inner.jaxpr, inner.consts, inputs)
        else:
            names = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
            outputs = _part(jaxpr, consts, {i}, names, eqn.outvars)(*(values[var] for var in names))
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [var.val if isinstance(var, jex.Literal) else values[var] for var in jaxpr.outvars]


def _inputs(eqn: Any) -> set[Any]:
    return {var for var in eqn.invars if not isinstance(var, jex.Literal)}


def _reached(jaxpr: Any, start: Iterable[Any], *, every: bool) -> set[Any]:
    """Return the variables computed from `start`: from it alone if `every`, else from any of it."""
    reached = set(start)
    for eqn in jaxpr.eqns:
        inputs = _inputs(eqn)
        if inputs <= reached if every else inputs & reached:
            reached |= set(eqn.outvars)
    return reached


def _kept(
    jaxpr: Any, makes: dict[Any, int], x: Sequence[Any], free: set[Any], late: set[Any], gradients: Sequence[Any]
) -> list[Any]:
    """Return what to keep of the forward pass, for what the gradients, which wait for dy, read of it."""
    needed, _ = _slice(jaxpr, makes, gradients, stop=set(x))
    waiting = [i for i in sorted(needed) if set(jaxpr.eqns[i].outvars) & late]
    early = [jaxpr.eqns[i] for i in sorted(needed.difference(waiting))]
    reads = [*gradients, *(var for i in waiting for var in _inputs(jaxpr.eqns[i]))]
    return fewest_bytes(early, x, free, [v for v in reads if not isinstance(v, jex.Literal) and v not in late])


def _slice(
    jaxpr: Any, makes: dict[Any, int], wanted: Iterable[Any], *, stop: set[Any], extra: Iterable[int] = ()
) -> tuple[set[int], list[Any]]:
    """Return the equations that compute `wanted` from `stop`, and which of `stop` they read."""
    equations, read = set(extra), {}
    todo = [var for var in wanted if not isinstance(var, jex.Literal)]
    todo += [var for i in equations for var in _inputs(jaxpr.eqns[i])]
    while todo:
        var = todo.pop()
        if var in stop:
            read[var] = None
        elif var in makes and makes[var] not in equations:
            equations.add(makes[var])
            todo += _inputs(jaxpr.eqns[makes[var]])
    return equations, list(read)


def _part(jaxpr: Any, consts: Any, equations: set[int], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Return the function that these equations are."""
    part = jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=[jaxpr.eqns[i] for i in sorted(equations)],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return lambda *args: jax.core.eval_jaxpr(part, consts, *args)


def _split(values: Sequence[Any], at: int) -> tuple[Arrays, Arrays]:
    return list(values[:at]), list(values[at:])
