"""Recognises equations that jax writes in another way for a piece of one row.

- `x @ y` of [B, T, D] and [B, D, S] is one product with a batch dim. For B = 1 jax writes two
  squeezes, a product and a broadcast.
- `jnp.broadcast_to(x, [B, T, D])` of [1, T, D] is a broadcast. For B = 1 jax returns x itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from shardopt.separability._relations import dim_after_removal
from shardopt.trace._jaxprs import shape_of
from shardopt.trace._primitives import library_name

NAMES = ("squeeze", "squeeze", "dot_general", "broadcast_in_dim")


def batched_product(whole_eqn: JaxprEqn, piece_eqns: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """Return the next four equations of the piece trace as one product like `whole_eqn`.

    None if they are not this product.

    A dim of size 1 that both operands lose, and the result gets back, is a batch dim: there is one
    product along it.

    Args:
      whole_eqn: the equation of the whole trace.
      piece_eqns: the next equations of the piece trace.
    """
    if (
        whole_eqn.primitive.name != "dot_general"
        or tuple(library_name(eqn.primitive) for eqn in piece_eqns[:4]) != NAMES
    ):
        return None
    left_squeeze, right_squeeze, product, broadcast = piece_eqns[:4]
    if (
        product.invars != [left_squeeze.outvars[0], right_squeeze.outvars[0]]
        or broadcast.invars != product.outvars
    ):
        return None
    contract_dims, batch_dims = whole_eqn.params["dimension_numbers"]
    squeezed = left_squeeze.params["dimensions"], right_squeeze.params["dimensions"]
    pairs = [
        pair for pair in zip(*batch_dims, strict=True) if pair == (squeezed[0][0], squeezed[1][0])
    ]
    if len(squeezed[0]) != 1 or len(squeezed[1]) != 1 or len(pairs) != 1:
        return None
    result_dim = list(zip(*batch_dims, strict=True)).index(pairs[0])

    def without_squeezed(dims: Sequence[int], side: int) -> tuple[int, ...]:
        return tuple(
            dim_after_removal(dim, squeezed[side]) for dim in dims if dim != squeezed[side][0]
        )

    numbers = tuple(
        tuple(without_squeezed(both_sides[side], side) for side in (0, 1))
        for both_sides in (contract_dims, batch_dims)
    )
    same = all(
        whole_eqn.params[name] == product.params[name]
        for name in whole_eqn.params
        if name != "dimension_numbers"
    )
    ndim = len(broadcast.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    restored = tuple(dim for dim in range(ndim) if dim != result_dim)
    if (
        not same
        or product.params["dimension_numbers"] != numbers
        or tuple(broadcast.params["broadcast_dimensions"]) != restored
        or broadcast.outvars[0].aval.shape[result_dim] != 1  # pyright: ignore[reportAttributeAccessIssue]
    ):
        return None
    operands = [left_squeeze.invars[0], right_squeeze.invars[0]]
    return product.replace(invars=operands, outvars=broadcast.outvars, params=whole_eqn.params)


def omitted_broadcast(
    whole_eqn: JaxprEqn, piece_eqns: Sequence[JaxprEqn], piece_var_of: Mapping[Any, Any]
) -> JaxprEqn | None:
    """Return the broadcast that the piece trace omits because it changes no shape.

    None if the piece trace has it.

    Args:
      whole_eqn: the equation of the whole trace.
      piece_eqns: the next equations of the piece trace.
      piece_var_of: the variable of the piece trace for each of the whole trace.
    """
    if whole_eqn.primitive.name != "broadcast_in_dim" or isinstance(whole_eqn.invars[0], Literal):
        return None
    operand = piece_var_of[whole_eqn.invars[0]]
    if (
        piece_eqns
        and piece_eqns[0].primitive.name == "broadcast_in_dim"
        and piece_eqns[0].invars[0] is operand
    ):
        return None
    if whole_eqn.params["broadcast_dimensions"] != tuple(
        range(len(shape_of(whole_eqn.outvars[0])))
    ):
        return None
    params = whole_eqn.params | {"shape": shape_of(operand), "sharding": None}
    return whole_eqn.replace(invars=[operand], outvars=[operand], params=params)
