"""Split a block into forward, input gradient and weight gradient: three functions with residuals
between them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core import Arrays, abstract, inexact_indices, replaced
from shardopt.trace._jaxprs import CHECKPOINTS, shape_of
from shardopt.trace._parts import (
    Atom,
    Shapes,
    Trace,
    abstract_value,
    fewest_bytes,
    inlined,
    inputs_of,
    part_of,
    reached_from,
    slice_of,
    trace_of,
    variables_of,
)
from shardopt.trace._primitives import ARITHMETIC


class Passes(NamedTuple):
    """The passes of one block `f(arguments, x) -> y`.

    `arguments` are its weights, indices and keys.

    Two kinds of values are computed again instead of stored: values that depend on `arguments`
    alone (casts and gathers of weights, dropout masks), and results of elementwise operations on
    residuals. All other values, such as inner products and reductions, are computed once.

    Attributes:
      forward: `forward(arguments, x) -> (y, residuals)`. The later passes read the residuals.
      backward: `backward(arguments, residuals, dy) -> (dx, deferred)`: the gradient of the input,
        and the values that `weight` reads, such as the cotangents of inner products.
      weight: `weight(arguments, [residuals[i] for i in weight_residuals], deferred) -> dw`: the
        gradient of the weights.
      both: `both(arguments, residuals, dy) -> (dx, dw)`: `backward` and `weight` in one function.
      residuals: shapes of the residuals.
      deferred: shapes of the deferred values.
      weight_residuals: indices of the residuals that `weight` reads.
    """

    forward: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
    backward: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weight: Callable[[Arrays, Arrays, Arrays], Arrays]
    both: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    deferred: tuple[jax.ShapeDtypeStruct, ...]
    weight_residuals: tuple[int, ...]


def split_backward(
    f: Callable[[Arrays, Arrays], Arrays],
    arguments: Shapes,
    x: Shapes,
    *,
    trained: Sequence[int],
    differentiated: Sequence[int] | None = None,
    y: Shapes | None = None,
    gathers: bool = True,
) -> Passes:
    """Trace a block with its gradients, and split the trace into `Passes`.

    Args:
      f: the block, a function of two lists of arrays. Integer leaves of its result y have no
        gradient, and dy omits them.
      arguments: weights and other arguments, or their shapes.
      x: the input, or its shapes.
      trained: indices of the `arguments` in the weight gradient.
      differentiated: indices of the leaves of x in dx; by default all with a floating dtype.
      y: the shapes of the result; by default the shapes of x.
      gathers: whether f gathers its arguments. Then all that depends on arguments alone is computed
        again; otherwise only its elementwise operations are.

    Note:
      `jax.vjp` stores every intermediate result, weights included, and computes both gradients at
      once. Here each equation of the trace goes to the first pass that needs it. A value that a
      later pass reads is a residual. So the weight gradient can run later than the input gradient
      without repeating work. For y = g(x @ w), the cotangent of x @ w is deferred, and its product
      with x runs later.
    """
    in_dx = inexact_indices(x) if differentiated is None else differentiated
    y_shapes = x if y is None else y
    in_dy = inexact_indices(y_shapes)

    def with_gradients(arguments: Arrays, x: Arrays, dy: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        def block(weights: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
            y = f(replaced(arguments, trained, weights), replaced(x, in_dx, inputs))
            # `vjp` wants floating results alone; the others come out as `has_aux`.
            return [y[i] for i in in_dy], y

        _, vjp, y = jax.vjp(
            block, [arguments[i] for i in trained], [x[i] for i in in_dx], has_aux=True
        )
        dw, dx = vjp(dy)
        return y, dx, dw

    arguments, x, y_shapes = abstract((list(arguments), list(x), list(y_shapes)))
    args = (arguments, x, [y_shapes[i] for i in in_dy])
    # Traced twice: the second trace inlines inner functions, so that a cut may go through them.
    nested, results = jax.make_jaxpr(with_gradients, return_shape=True)(*args)
    flat = jax.make_jaxpr(
        lambda *args: inlined(nested.jaxpr, nested.consts, jax.tree.leaves(args))
    )(*args)
    trace = trace_of(jex.ClosedJaxpr(without_transposes(flat.jaxpr), flat.consts))
    invars = jax.tree.unflatten(jax.tree.structure(args), trace.jaxpr.invars)
    outvars = jax.tree.unflatten(jax.tree.structure(results), trace.jaxpr.outvars)
    return _cut(trace, invars, outvars, gathers)


def rematerialised(passes: Passes, x: Shapes) -> Passes:
    """Return passes that store the input alone.

    `backward` runs the forward again, `weight` does not.
    """

    def backward(arguments: Arrays, x: Arrays, dy: Arrays) -> tuple[Arrays, Arrays]:
        _, residuals = passes.forward(arguments, x)
        dx, deferred = passes.backward(arguments, residuals, dy)
        return dx, [*deferred, *(residuals[i] for i in passes.weight_residuals)]

    def weight(arguments: Arrays, _: Arrays, deferred: Arrays) -> Arrays:
        num_deferred = len(passes.deferred)
        return passes.weight(arguments, deferred[num_deferred:], deferred[:num_deferred])

    return Passes(
        forward=lambda arguments, x: (passes.forward(arguments, x)[0], list(x)),
        backward=backward,
        weight=weight,
        both=lambda arguments, x, dy: passes.both(arguments, passes.forward(arguments, x)[1], dy),
        residuals=tuple(abstract(list(x))),
        deferred=(*passes.deferred, *(passes.residuals[i] for i in passes.weight_residuals)),
        weight_residuals=(),
    )


def _cut(
    trace: Trace,
    invars: tuple[list[jex.Var], list[jex.Var], list[jex.Var]],
    outvars: tuple[list[Atom], list[Atom], list[Atom]],
    gathers: bool,
) -> Passes:
    """Return the passes of a trace from (arguments, x, dy) to (y, dx, dw)."""
    jaxpr = trace.jaxpr
    arguments, x, dy = invars
    y, dx, dw = outvars
    #  arguments, x -> [forward] -> y
    #                      | residuals
    #                      v
    #  arguments, dy -> [backward] -> dx
    #                      | deferred
    #                      v
    #  arguments ---> [weight] -> dw
    #
    # Each slice below walks back from results until values that an earlier pass hands over.
    # Equations that it meets run in this pass, also if an earlier pass ran them: they run again.
    recomputable = {*jaxpr.constvars, *arguments}
    if gathers:
        of_arguments = reached_from(jaxpr, recomputable, every=True)
        recomputable = of_arguments - reached_from(jaxpr, called_back(jaxpr), every=False)
    depends_on_dy = reached_from(jaxpr, dy, every=False)
    residuals = _residuals(trace, x, recomputable, depends_on_dy, [*dx, *dw])
    # An equation with an effect runs once, in the first pass that has its inputs.
    effects = {i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects}
    early_effects = {i for i in effects if not inputs_of(jaxpr.eqns[i]) & depends_on_dy}

    in_forward, _ = slice_of(trace, [*y, *residuals], stop=set(x), extra=early_effects)
    in_both, _ = slice_of(trace, [*dx, *dw], stop={*residuals, *dy}, extra=effects - early_effects)
    # Both halves of a split checkpoint run its inner forward pass. An effect must not run twice.
    separated = trace if effects else trace_of(_separate_checkpoints(trace, dx))
    in_backward, _ = slice_of(separated, dx, stop={*residuals, *dy}, extra=effects - early_effects)
    # The backward pass has these values anyway. The weight pass gets them, and repeats nothing that
    # depends on dy.
    deferrable = {
        *dy,
        *(
            var
            for i in in_backward
            for var in separated.jaxpr.eqns[i].outvars
            if var in depends_on_dy
        ),
    }
    in_weight, crossing = slice_of(separated, dw, stop={*residuals, *deferrable})
    deferred = [var for var in crossing if var in deferrable]
    residuals_of_weight = [var for var in crossing if var not in deferrable]

    forward = part_of(trace, in_forward, [*arguments, *x], [*y, *residuals])
    backward = part_of(separated, in_backward, [*arguments, *residuals, *dy], [*dx, *deferred])
    weight = part_of(separated, in_weight, [*arguments, *residuals_of_weight, *deferred], dw)
    # From the trace before the split: in one function a checkpoint runs its forward pass once.
    both = part_of(trace, in_both, [*arguments, *residuals, *dy], [*dx, *dw])
    return Passes(
        forward=lambda arguments, x: _split(forward(*arguments, *x), len(y)),
        backward=lambda arguments, residuals, dy: _split(
            backward(*arguments, *residuals, *dy), len(dx)
        ),
        weight=lambda arguments, residuals, deferred: weight(*arguments, *residuals, *deferred),
        both=lambda arguments, residuals, dy: _split(both(*arguments, *residuals, *dy), len(dx)),
        residuals=tuple(map(abstract_value, residuals)),
        deferred=tuple(map(abstract_value, deferred)),
        weight_residuals=tuple(map(residuals.index, residuals_of_weight)),
    )


def _separate_checkpoints(trace: Trace, dx: Sequence[Atom]) -> jex.ClosedJaxpr:
    """Return the trace with each `jax.checkpoint` of both gradients split: one for `dx`, one for
    the other results.

    Without the split, the backward pass would also compute the weight gradient, and store it for
    the weight pass. Both parts recompute their inputs, so a checkpoint is split only if they share
    no expensive equation.
    """
    for_dx, _ = slice_of(trace, dx, stop=set())
    read_variables = {
        *variables_of(dx),
        *(var for i in for_dx for var in inputs_of(trace.jaxpr.eqns[i])),
    }
    equations = []
    for i, eqn in enumerate(trace.jaxpr.eqns):
        groups = [
            [v for v in eqn.outvars if (v in read_variables) is needed] for needed in (True, False)
        ]
        is_checkpoint = eqn.primitive.name in CHECKPOINTS and i in for_dx
        equations += _split_checkpoint(eqn, groups) if is_checkpoint and all(groups) else [eqn]
    return jex.ClosedJaxpr(trace.jaxpr.replace(eqns=equations), trace.consts)


def _split_checkpoint(eqn: jex.JaxprEqn, groups: Sequence[Sequence[jex.Var]]) -> list[jex.JaxprEqn]:
    """Return one checkpoint for each group of results.

    Return it unchanged if groups share an expensive equation.
    """
    body = eqn.params["jaxpr"]
    flat = jax.make_jaxpr(lambda *args: inlined(body, (), args))(
        *(abstract_value(var) for var in body.invars)
    )
    trace = trace_of(flat)
    inner = dict(zip(eqn.outvars, flat.jaxpr.outvars, strict=True))
    outer = dict(zip(flat.jaxpr.invars, eqn.invars, strict=True))
    slices = [slice_of(trace, [inner[var] for var in group], stop=set(outer)) for group in groups]
    shared = set.intersection(*(equations for equations, _ in slices))
    if flat.consts or any(flat.jaxpr.eqns[i].primitive.name not in _CHEAP for i in shared):
        return [eqn]
    parts = []
    for group, (equations, inputs) in zip(groups, slices, strict=True):
        jaxpr = flat.jaxpr.replace(
            invars=inputs,
            outvars=[inner[var] for var in group],
            eqns=[flat.jaxpr.eqns[i] for i in sorted(equations)],
            debug_info=flat.jaxpr.debug_info.with_unknown_names(),
        )
        parts.append(
            eqn.replace(
                invars=[outer[var] for var in inputs],
                outvars=list(group),
                params=eqn.params | {"jaxpr": jaxpr},
            )
        )
    return parts


def _split(values: Arrays, index: int) -> tuple[Arrays, Arrays]:
    return list(values[:index]), list(values[index:])


def called_back(jaxpr: jex.Jaxpr) -> list[jex.Var]:
    """Return the results of callbacks, which may be other numbers in another call."""
    return [
        var
        for eqn in jaxpr.eqns
        # a gather has an effect too, the name of its axis
        if any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        for var in eqn.outvars
    ]


def _residuals(
    trace: Trace,
    x: Sequence[jex.Var],
    recomputable: set[jex.Var],
    depends_on_dy: set[jex.Var],
    gradients: Sequence[Atom],
) -> list[jex.Var]:
    """Return the residuals: variables of the forward pass that the equations after dy are computed
    from.
    """
    equations = trace.jaxpr.eqns
    needed, _ = slice_of(trace, gradients, stop=set(x))
    # Equations before dy could run in either pass. The cut decides: store a result, or run it
    # again.
    after_dy = [i for i in sorted(needed) if set(equations[i].outvars) & depends_on_dy]
    before_dy = [equations[i] for i in sorted(needed.difference(after_dy))]
    reads = [*gradients, *(var for i in after_dy for var in inputs_of(equations[i]))]
    return _min_byte_cut(
        before_dy,
        x,
        recomputable,
        [v for v in reads if not isinstance(v, jex.Literal) and v not in depends_on_dy],
    )


# Arithmetic and primitives that move elements: compilers fuse them into their readers. Other
# primitives are expensive.
_CHEAP = ARITHMETIC | frozenset(
    """broadcast_in_dim concatenate copy expand_dims iota name pad reshape rev slice split squeeze stop_gradient
    transpose""".split()  # noqa: SIM905
)


def _min_byte_cut(
    equations: Sequence[jex.JaxprEqn],
    start: Iterable[jex.Var],
    free: set[jex.Var],
    wanted: Iterable[jex.Var],
) -> list[jex.Var]:
    """Return the variables to store, so that `wanted` can be computed from them by cheap equations
    alone.

    Results of expensive equations must be stored to be used. If several sets are equal, the result
    is the one nearest to `wanted`, because it leaves the least to compute again; see
    `fewest_bytes`.

    Args:
      equations: equations that may run again, in order.
      start: variables that exist at first, and must be stored to be used.
      free: variables that are always available and need not be stored.
      wanted: variables computed by these equations, or among `start`.
    """
    wanted = [var for var in dict.fromkeys(wanted) if var not in free]
    if not wanted:
        return []
    variables = list(
        dict.fromkeys([*start, *(v for eqn in equations for v in eqn.outvars if v not in free)])
    )
    known = set(variables)
    sources = set(start)
    arcs = []
    for eqn in equations:
        made = [var for var in eqn.outvars if var in known]
        if eqn.primitive.name not in _CHEAP or eqn.effects:
            # No way leads back through an expensive equation. So a way begins at its result, and
            # the cut has to store that, or values computed from it.
            sources.update(made)
        else:
            arcs += itertools.product([var for var in inputs_of(eqn) if var in known], made)
    return fewest_bytes(variables, sources, arcs, wanted)


def without_transposes(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """Return the same trace with `dot_general(b, a)` for each `transpose(dot_general(a, b))` that
    equals it.

    jax writes the weight gradient of `x @ w` as `transpose(dot_general(dy, x))`. XLA:CPU then
    copies dy into another order before the product, and copies the result when it adds it to the
    gradients. `dot_general(x, dy)` has the order of the weights, adds the same numbers, and reads
    dy without a copy.
    """
    reads = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, jex.Var))
    reads.update(v for v in jaxpr.outvars if isinstance(v, jex.Var))
    products: dict[jex.Var, int] = {}
    equations: dict[int, jex.JaxprEqn] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        equations[i] = eqn
        name = eqn.primitive.name
        if name in CHECKPOINTS:
            equations[i] = eqn.replace(
                params=eqn.params | {"jaxpr": without_transposes(eqn.params["jaxpr"])}
            )
        elif name == "dot_general" and reads[eqn.outvars[0]] == 1:
            products[eqn.outvars[0]] = i
        elif name == "transpose" and eqn.invars[0] in products:
            swapped = _swapped(jaxpr.eqns[products[eqn.invars[0]]], eqn.params["permutation"])
            if swapped is not None:
                del equations[products[eqn.invars[0]]]
                equations[i] = swapped.replace(outvars=eqn.outvars)
    return jaxpr.replace(eqns=list(equations.values()))


def _swapped(product: jex.JaxprEqn, permutation: Sequence[int]) -> jex.JaxprEqn | None:
    """Return `dot_general(b, a)` for `dot_general(a, b)` if it equals the transpose by
    `permutation`; else None.
    """
    a, b = product.invars
    params = dict(product.params)
    (contracting_a, contracting_b), (batch_a, batch_b) = params["dimension_numbers"]
    batch = len(batch_a)
    end_of_a_dims = len(shape_of(a)) - len(contracting_a)
    dims = range(len(permutation))
    if [*permutation] != [*dims[:batch], *dims[end_of_a_dims:], *dims[batch:end_of_a_dims]]:
        return None
    params["dimension_numbers"] = (contracting_b, contracting_a), (batch_b, batch_a)
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    sharding = params["out_sharding"]
    if sharding is not None:
        axes = [*sharding.spec, *[None] * len(dims)]
        params["out_sharding"] = NamedSharding(
            sharding.mesh, PartitionSpec(*(axes[dim] for dim in permutation))
        )
    return product.replace(invars=[b, a], params=params)
