"""Products of a trace the other way round, where the trace transposes what they give."""

from collections import Counter
from collections.abc import Sequence

import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.core.jaxprs import CHECKPOINTS
from shardopt.core.trace import shape_of


def without_transposes(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """Return the same trace with each `transpose(dot_general(a, b))` as `dot_general(b, a)`, where they are equal.

    jax writes gradients of weights that way: of `x @ w` as `transpose(dot_general(dy, x))`. XLA:CPU then copies dy into
    another order before the product, and what it gives once more to add it to the gradients. `dot_general(x, dy)` has
    the order of the weights, adds up the same numbers, and reads dy as it lies.
    """
    reads = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, jex.Var))
    reads.update(v for v in jaxpr.outvars if isinstance(v, jex.Var))
    products: dict[jex.Var, int] = {}
    equations: dict[int, jex.JaxprEqn] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        equations[i] = eqn
        name = eqn.primitive.name
        if name in CHECKPOINTS:
            equations[i] = eqn.replace(params=eqn.params | {"jaxpr": without_transposes(eqn.params["jaxpr"])})
        elif name == "dot_general" and reads[eqn.outvars[0]] == 1:
            products[eqn.outvars[0]] = i
        elif name == "transpose" and eqn.invars[0] in products:
            swapped = _swapped(jaxpr.eqns[products[eqn.invars[0]]], eqn.params["permutation"])
            if swapped is not None:
                del equations[products[eqn.invars[0]]]
                equations[i] = swapped.replace(outvars=eqn.outvars)
    return jaxpr.replace(eqns=list(equations.values()))


def _swapped(product: jex.JaxprEqn, permutation: Sequence[int]) -> jex.JaxprEqn | None:
    """Return `dot_general(b, a)` for `dot_general(a, b)`, if that has its dims in this order; else None."""
    a, b = product.invars
    params = dict(product.params)
    (contracting_a, contracting_b), (batch_a, batch_b) = params["dimension_numbers"]
    batch, end_of_a = len(batch_a), len(shape_of(a).shape) - len(contracting_a)
    dims = range(len(permutation))
    if [*permutation] != [*dims[:batch], *dims[end_of_a:], *dims[batch:end_of_a]]:
        return None
    params["dimension_numbers"] = (contracting_b, contracting_a), (batch_b, batch_a)
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    if (where := params["out_sharding"]) is not None:
        axes = [*where.spec, *[None] * len(dims)]
        params["out_sharding"] = NamedSharding(where.mesh, PartitionSpec(*(axes[dim] for dim in permutation)))
    return product.replace(invars=[b, a], params=params)
