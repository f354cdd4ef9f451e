"""What jax writes in another way for a piece of one row: a product over a dim of size 1, which it leaves out.

`x @ y` of [B, T, D] and [B, D, S] is one product with a batch dim; for B = 1 it is two squeezes, a product and a broadcast.
"""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

NAMES = ("squeeze", "squeeze", "dot_general", "broadcast_in_dim")


def batched_product(whole: JaxprEqn, following: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """Return the first equations of a piece as the one product that they are in the whole; None if they are not.

    A dim of size 1 that both operands lose, and the result gets back, is a batch dim: there is one product along it.

    Args:
      whole: the equation of the whole.
      following: the equations of the piece from there on.
    """
    if whole.primitive.name != "dot_general" or tuple(eqn.primitive.name for eqn in following[:4]) != NAMES:
        return None
    left, right, product, result = following[:4]
    if product.invars != [left.outvars[0], right.outvars[0]] or result.invars != product.outvars:
        return None
    contract, batch = whole.params["dimension_numbers"]
    gone = left.params["dimensions"], right.params["dimensions"]
    pairs = [pair for pair in zip(*batch, strict=True) if pair == (gone[0][0], gone[1][0])]
    if len(gone[0]) != 1 or len(gone[1]) != 1 or len(pairs) != 1:
        return None
    at = list(zip(*batch, strict=True)).index(pairs[0])

    def without(dims: Sequence[int], side: int) -> tuple[int, ...]:
        return tuple(dim - (dim > gone[side][0]) for dim in dims if dim != gone[side][0])

    numbers = tuple(tuple(without(both[side], side) for side in (0, 1)) for both in (contract, batch))
    same = all(whole.params[name] == product.params[name] for name in whole.params if name != "dimension_numbers")
    ndim = len(result.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    restored = tuple(dim for dim in range(ndim) if dim != at)
    if (
        not same
        or _tuples(product.params["dimension_numbers"]) != numbers
        or tuple(result.params["broadcast_dimensions"]) != restored
    ):
        return None
    if result.outvars[0].aval.shape[at] != 1:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    operands = [left.invars[0], right.invars[0]]
    return product.replace(invars=operands, outvars=result.outvars, params=whole.params)


def _tuples(numbers: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(tuple(dims) for dims in both) for both in numbers)
