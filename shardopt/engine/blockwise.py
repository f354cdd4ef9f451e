"""Whether a part of an update does to each block what it does to the others, so that blocks can be worked on apart.

Two traces say so, one of the update at L blocks and one at a single block: where they have the same equations, a dim that
is k L long in one and k in the other counts blocks, and every equation of the part must leave that dim alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from shardopt.core.jaxprs import called
from shardopt.core.primitives import DECOMPOSITIONS, ELEMENTWISE
from shardopt.core.trace import Atom, shape_of
from shardopt.engine.matrix_tasks import is_opaque

_ALONG = {
    "sort": "dimension",
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "iota": "dimension",
}
"""What mixes along one dim, by the parameter that names it."""
_FREE = ELEMENTWISE | {"broadcast_in_dim", "transpose", "slice", "pad"}
_OVER_OTHERS = ("reduce_", "arg")
"""What is over other dims, where the result counts blocks yet."""


def same_equations(whole: jex.Jaxpr, single: jex.Jaxpr) -> dict[jex.Var, jex.Var] | None:
    """Return which variable of one trace stands for which of another; None if the equations differ.

    What they close over is matched where it is first read, and the loss closes over what it likes.
    """
    if len(whole.eqns) != len(single.eqns) or len(whole.invars) != len(single.invars):
        return None
    found = dict(zip(whole.invars, single.invars, strict=True))
    free = set(whole.constvars), set(single.constvars)

    def same(a: Atom, b: Atom) -> bool:
        if isinstance(a, jex.Literal) or isinstance(b, jex.Literal):
            return isinstance(a, jex.Literal) and isinstance(b, jex.Literal) and bool(np.array_equal(a.val, b.val))
        if a in free[0] and b in free[1]:
            found.setdefault(a, b)
        return found.get(a) is b and len(shape_of(a).shape) == len(shape_of(b).shape)

    def same_reads(old: Sequence[Atom], new: Sequence[Atom]) -> bool:
        return len(old) == len(new) and all(map(same, old, new))

    for old, new in zip(whole.eqns, single.eqns, strict=True):
        loss = is_opaque(old) and is_opaque(new)
        if old.primitive is not new.primitive or not (loss or same_reads(old.invars, new.invars)):
            return None
        found |= dict(zip(old.outvars, new.outvars, strict=True))
    return found if same_reads(whole.outvars, single.outvars) else None


def is_blockwise(
    whole: Sequence[jex.JaxprEqn], single: Sequence[jex.JaxprEqn], same: Mapping[jex.Var, jex.Var], blocks: int
) -> bool:
    """Return whether every equation treats blocks alike and apart.

    Args:
      whole: equations at L blocks.
      single: the same at one.
      same: what `same_equations` returned.
      blocks: L.
    """
    return all(_is_apart(old, new, same, blocks) for old, new in zip(whole, single, strict=True))


def block_dim(var: jex.Var, same: Mapping[jex.Var, jex.Var], blocks: int) -> int | None:
    """Return the dim of a variable that counts blocks, None if none does, -1 if its shapes differ otherwise."""
    old, new = shape_of(var).shape, shape_of(same[var]).shape
    differ = [dim for dim, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if not differ:
        return None
    dim, *others = differ
    return dim if not others and old[dim] == blocks * new[dim] else -1


def _is_apart(eqn: jex.JaxprEqn, single: jex.JaxprEqn, same: Mapping[jex.Var, jex.Var], blocks: int) -> bool:
    ins = [None if isinstance(var, jex.Literal) else block_dim(var, same, blocks) for var in eqn.invars]
    outs = [block_dim(var, same, blocks) for var in eqn.outvars]
    if all(dim is None for dim in (*ins, *outs)):
        return True
    if -1 in ins or -1 in outs:
        return False
    name, params = eqn.primitive.name, eqn.params
    if inner := called(eqn):
        if params.get("length") != single.params.get("length"):
            return False  # it goes from block to block
        return all(_is_blockwise_inside(a, b, blocks) for a, b in zip(inner, called(single), strict=True))
    if None in outs:
        return False  # blocks were added up, or one was taken
    if name in ("reshape", "squeeze", "expand_dims"):
        (before,), (after,) = ins, outs
        if before is None:
            return False
        old, new = shape_of(eqn.invars[0]).shape, shape_of(eqn.outvars[0]).shape
        return math.prod(old[:before]) == math.prod(new[:after])  # else blocks would be interleaved
    if name in _ALONG:
        return all(dim != params[_ALONG[name]] for dim in outs)
    if name == "concatenate":
        return None not in ins and outs[0] != params["dimension"]
    if name == "dot_general":
        return _is_apart_in_product(ins, params["dimension_numbers"])
    if name in DECOMPOSITIONS:
        ranks = [len(shape_of(var).shape) for var in eqn.invars if not isinstance(var, jex.Literal)]
        return all(dim is None or dim < max(ranks) - 2 for dim in ins)  # reflectors have a dim less than their matrix
    return name in _FREE or name.startswith(_OVER_OTHERS)


def _is_apart_in_product(ins: Sequence[int | None], numbers: Any) -> bool:
    """In a product blocks are a batch dim of both sides, or a free dim of one where the other is the same for all."""
    sums, batch = numbers
    left, right = ins
    if left is not None and right is not None:
        return left in batch[0] and right in batch[1] and batch[0].index(left) == batch[1].index(right)
    return all(dim not in (*sums[side], *batch[side]) for side, dim in enumerate(ins) if dim is not None)


def _is_blockwise_inside(whole: jex.Jaxpr, single: jex.Jaxpr, blocks: int) -> bool:
    same = same_equations(whole, single)
    return same is not None and is_blockwise(whole.eqns, single.eqns, same, blocks)
