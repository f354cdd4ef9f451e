"""A block's forward, input gradient and weight gradient as three functions, with the residuals that pass between them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from shardopt.core.jaxprs import CHECKPOINTS
from shardopt.core.primitives import ARITHMETIC
from shardopt.core.trace import (
    MOST,
    Arrays,
    Atom,
    Trace,
    bytes_of,
    inlined,
    inputs_of,
    min_cut,
    part_of,
    shape_of,
    slice_of,
    trace_of,
)
from shardopt.core.types import abstract
from shardopt.remat.transposed_products import without_transposes

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
    flat = jax.make_jaxpr(lambda *args: inlined(closed.jaxpr, closed.consts, jax.tree.leaves(args)))(*args)
    return _cut(jex.ClosedJaxpr(without_transposes(flat.jaxpr), flat.consts), len(given), len(x), len(trained))


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


def _cut(closed: jex.ClosedJaxpr, num_given: int, num_x: int, num_trained: int) -> Passes:
    jaxpr = closed.jaxpr
    trace = trace_of(closed)
    given, rest = jaxpr.invars[:num_given], jaxpr.invars[num_given:]
    x, dy = rest[:num_x], rest[num_x:]
    y, dx = jaxpr.outvars[:num_x], jaxpr.outvars[num_x : num_x + len(dy)]
    dw = jaxpr.outvars[len(jaxpr.outvars) - num_trained :]
    free = _reached(jaxpr, [*jaxpr.constvars, *given], every=True)
    late = _reached(jaxpr, dy, every=False)
    residuals = _residuals(trace, x, free, late, [*dx, *dw])
    # What has an effect is run once, as early as its arguments are there.
    effects = {i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects}
    early_effects = {i for i in effects if not inputs_of(jaxpr.eqns[i]) & late}

    in_forward, _ = slice_of(trace, [*y, *residuals], stop=set(x), extra=early_effects)
    in_both, _ = slice_of(trace, [*dx, *dw], stop={*residuals, *dy}, extra=effects - early_effects)
    apart = trace if effects else trace_of(_apart(trace, dx))
    in_backward, _ = slice_of(apart, dx, stop={*residuals, *dy}, extra=effects - early_effects)
    deferrable = {*dy, *(var for i in in_backward for var in apart.jaxpr.eqns[i].outvars if var in late)}
    in_weight, crossing = slice_of(apart, dw, stop={*residuals, *deferrable})
    deferred = [var for var in crossing if var in deferrable]
    residuals_of_weight = [var for var in crossing if var not in deferrable]

    forward = part_of(trace, in_forward, [*given, *x], [*y, *residuals])
    backward = part_of(apart, in_backward, [*given, *residuals, *dy], [*dx, *deferred])
    weight = part_of(apart, in_weight, [*given, *residuals_of_weight, *deferred], dw)
    both = part_of(trace, in_both, [*given, *residuals, *dy], [*dx, *dw])
    return Passes(
        forward=lambda given, x: _split(forward(*given, *x), num_x),
        backward=lambda given, residuals, dy: _split(backward(*given, *residuals, *dy), len(dy)),
        weight=lambda given, residuals, deferred: weight(*given, *residuals, *deferred),
        both=lambda given, residuals, dy: _split(both(*given, *residuals, *dy), len(dy)),
        residuals=tuple(map(shape_of, residuals)),
        deferred=tuple(map(shape_of, deferred)),
        weight_residuals=tuple(residuals.index(var) for var in residuals_of_weight),
    )


def _apart(trace: Trace, dx: Sequence[Atom]) -> jex.ClosedJaxpr:
    """Return the trace with each `jax.checkpoint` that makes both gradients cut into one for `dx` and one for the rest.

    Left whole, the backward pass would compute the weight gradient as well, and keep all of it for the weight pass. Both
    parts compute again what they need, so one is cut only where they share nothing dear.
    """
    for_dx, _ = slice_of(trace, dx, stop=set())
    read = {*dx, *(var for i in for_dx for var in inputs_of(trace.jaxpr.eqns[i]))}
    equations = []
    for i, eqn in enumerate(trace.jaxpr.eqns):
        groups = [[v for v in eqn.outvars if (v in read) is needed] for needed in (True, False)]
        is_checkpoint = eqn.primitive.name in CHECKPOINTS and i in for_dx
        equations += _halves(eqn, groups) if is_checkpoint and all(groups) else [eqn]
    return jex.ClosedJaxpr(trace.jaxpr.replace(eqns=equations), trace.consts)


def _halves(eqn: jex.JaxprEqn, groups: Sequence[Sequence[jex.Var]]) -> list[jex.JaxprEqn]:
    """Return a checkpoint as one equation for each group of its results; as it is, where they share what is dear."""
    whole = eqn.params["jaxpr"]
    flat = jax.make_jaxpr(lambda *args: inlined(whole, (), args))(*(shape_of(var) for var in whole.invars))
    trace = trace_of(flat)
    inner = dict(zip(eqn.outvars, flat.jaxpr.outvars, strict=True))
    outer = dict(zip(flat.jaxpr.invars, eqn.invars, strict=True))
    found = [slice_of(trace, [inner[var] for var in group], stop=set(outer)) for group in groups]
    shared = set.intersection(*(equations for equations, _ in found))
    if flat.consts or any(flat.jaxpr.eqns[i].primitive.name not in _CHEAP for i in shared):
        return [eqn]
    parts = []
    for group, (equations, inputs) in zip(groups, found, strict=True):
        jaxpr = flat.jaxpr.replace(
            invars=inputs,
            outvars=[inner[var] for var in group],
            eqns=[flat.jaxpr.eqns[i] for i in sorted(equations)],
            debug_info=flat.jaxpr.debug_info.with_unknown_names(),
        )
        parts.append(
            eqn.replace(
                invars=[outer[var] for var in inputs], outvars=list(group), params=eqn.params | {"jaxpr": jaxpr}
            )
        )
    return parts


def _reached(jaxpr: jex.Jaxpr, start: Iterable[jex.Var], *, every: bool) -> set[jex.Var]:
    """Return the variables computed from `start`: from it alone if `every`, else from any of it."""
    reached = set(start)
    for eqn in jaxpr.eqns:
        inputs = inputs_of(eqn)
        if inputs <= reached if every else inputs & reached:
            reached |= set(eqn.outvars)
    return reached


def _split(values: Arrays, at: int) -> tuple[Arrays, Arrays]:
    return list(values[:at]), list(values[at:])


def _residuals(
    trace: Trace, x: Sequence[jex.Var], free: set[jex.Var], late: set[jex.Var], gradients: Sequence[Atom]
) -> list[jex.Var]:
    """Return what to keep of the forward pass, for what the gradients, which wait for dy, read of it."""
    equations = trace.jaxpr.eqns
    needed, _ = slice_of(trace, gradients, stop=set(x))
    waiting = [i for i in sorted(needed) if set(equations[i].outvars) & late]
    early = [equations[i] for i in sorted(needed.difference(waiting))]
    reads = [*gradients, *(var for i in waiting for var in inputs_of(equations[i]))]
    return _fewestbytes_of(early, x, free, [v for v in reads if not isinstance(v, jex.Literal) and v not in late])


# Arithmetic and what moves elements: compilers fuse them into whatever reads them. Whatever is not named here is kept.
_CHEAP = ARITHMETIC | frozenset(
    """broadcast_in_dim concatenate copy expand_dims iota name pad reshape rev slice split squeeze stop_gradient
    transpose""".split()  # noqa: SIM905
)


def _fewestbytes_of(
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
    weights = [bytes_of(var) for var in variables]
    unit = max(sum(weights) / (MOST // 2), 1.0)
    edges: dict[tuple[int, int], int] = {}
    for i, weight in enumerate(weights):  # a variable is an edge from its own entry to its own exit
        edges[i, count + i] = max(math.ceil(weight / unit), 1)
    for var in start:
        edges[source, number[var]] = MOST
    for eqn in equations:
        inputs = [number[v] for v in eqn.invars if not isinstance(v, jex.Literal) and v in number]
        dear = eqn.primitive.name not in _CHEAP or bool(eqn.effects)
        for var in eqn.outvars:
            if var in number:
                edges |= {(source, number[var]): MOST} if dear else {(count + i, number[var]): MOST for i in inputs}
    for var in wanted:
        edges[count + number[var], sink] = MOST
    cut = min_cut(edges, 2 * count + 2, source, sink)
    return [variables[i] for i in sorted(i for i, exit_ in cut if i < count and exit_ == count + i)]
