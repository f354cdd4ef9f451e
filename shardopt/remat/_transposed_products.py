"""Swap the operands of inner products in a trace, if that removes a transpose of their results."""

from collections import Counter
from collections.abc import Sequence

import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.trace._jaxprs import CHECKPOINTS, shape_of


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
    batch, end_of_a_dims = len(batch_a), len(shape_of(a)) - len(contracting_a)
    dims = range(len(permutation))
    if [*permutation] != [*dims[:batch], *dims[end_of_a_dims:], *dims[batch:end_of_a_dims]]:
        return None
    params["dimension_numbers"] = (contracting_b, contracting_a), (batch_b, batch_a)
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    if (sharding := params["out_sharding"]) is not None:
        axes = [*sharding.spec, *[None] * len(dims)]
        params["out_sharding"] = NamedSharding(
            sharding.mesh, PartitionSpec(*(axes[dim] for dim in permutation))
        )
    return product.replace(invars=[b, a], params=params)
