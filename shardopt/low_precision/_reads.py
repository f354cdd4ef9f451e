"""Products in 8 bits alone read a weight that is rounded.

A block with any other read of it is refused.

Numbers and scales are arrays within the weight. `jax.tree.map` and `jax.tree.leaves` reach them,
and know nothing of 8 bits.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from shardopt.core import PyTree, format_error
from shardopt.low_precision._weight import RoundedWeight
from shardopt.trace._marks import OPENED, value_name
from shardopt.trace._primitives import IDENTITIES
from shardopt.trace._walk import Equations, Walk, scan_parts, while_parts

_PASSES = IDENTITIES | {"optimization_barrier"}
"""Primitives that pass an array on."""


def reading_in_products(
    caller: str, block: Callable[[PyTree, PyTree], PyTree]
) -> Callable[[PyTree, PyTree], PyTree]:
    """Return `block(weights, x)`, which is refused if it reads a `RoundedWeight` elsewhere than in
    a product in 8 bits.

    Raises:
      TypeError: by a call, with the primitives that read it.
    """

    def run(weights: PyTree, x: PyTree) -> PyTree:
        nodes = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, RoundedWeight))
        of_rounded = [
            isinstance(node, RoundedWeight) for node in nodes for _ in jax.tree.leaves(node)
        ]
        if not any(of_rounded):
            return block(weights, x)
        traced, results = jax.make_jaxpr(block, return_shape=True)(weights, x)
        arguments = jax.tree.leaves((weights, x))
        readers = _readers(traced, [*of_rounded, *[False] * (len(arguments) - len(of_rounded))])
        if readers:
            problem = (
                "a block reads a weight that BlockModel.rounded names, elsewhere than in a product"
                " in 8 bits."
            )
            fix = (
                "multiply it by so.nn.quantized_einsum alone, or take its name out of"
                " BlockModel.rounded."
            )
            raise TypeError(
                format_error(caller, problem, [f"read by {reader}" for reader in readers], fix)
            )
        return jax.tree.structure(results).unflatten(jaxpr_as_fun(traced)(*arguments))

    return run


def _readers(traced: ClosedJaxpr, of_rounded: Sequence[bool]) -> list[str]:
    """Return the primitives that read arrays of rounded weights which no product has named
    `OPENED`.
    """
    readers: dict[str, None] = {}

    def are_of_rounded(walk: Walk[bool], eqns: Equations, operands: list[bool]) -> list[bool]:
        (eqn,) = eqns
        kind = eqn.primitive.name
        results = [False] * len(eqn.outvars)
        if value_name(eqn.primitive, eqn.params) == OPENED:
            if not all(operands):
                readers["the block, which made other arrays for it"] = None
            return results
        if not any(operands):
            return results
        if kind in _PASSES or (kind == "convert_element_type" and _keeps_numbers(eqn)):
            return operands
        inner = _inside(walk, eqns, operands)
        if inner is None:
            readers[kind] = None
            return results
        return inner

    def nothing(_: Sequence[Any]) -> bool:
        return False

    walk = Walk(
        are_of_rounded, constant=nothing, literal=nothing, different=False, join=operator.or_
    )
    if any(walk.follow([traced], of_rounded)):
        readers["the result of the block"] = None
    return list(readers)


def _inside(walk: Walk[bool], eqns: Equations, operands: list[bool]) -> list[bool] | None:
    """Return which results of a call, branch or loop are of rounded weights.

    None if the equation itself reads one.
    """
    (eqn,) = eqns
    kind = eqn.primitive.name
    if kind == "cond":
        return None if operands[0] else walk.branches(eqns, operands[1:])
    if kind == "scan":
        parts = scan_parts(eqn, operands)
        if any(parts[2]):  # a turn reads a slice of it
            return None
        carry, stacked = walk.loop([eqn.params["jaxpr"]], *parts)
        return [*carry, *stacked]
    if kind == "while":
        condition_consts, consts, carry = while_parts(eqn, operands)
        if any(condition_consts):
            return None
        carry, _ = walk.loop([eqn.params["body_jaxpr"]], consts, carry)
        return None if any(carry) else carry  # the condition reads the carry
    return walk.call(eqns, operands)


def _keeps_numbers(cast: JaxprEqn) -> bool:
    """Return whether a cast is to a wider dtype; products notice that it is another one."""
    dtype = cast.params["new_dtype"]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(getattr(cast.invars[0].aval, "dtype", dtype), dtype) == dtype
