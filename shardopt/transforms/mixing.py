"""Whether an optimizer looks beyond single elements: one that does means something else on a shard."""

from collections.abc import Iterator
from typing import Any

import jax
import optax

from shardopt.core.errors import complaint
from shardopt.core.types import PyTree, abstract

MIXES = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
        "dot_general",
        "conv_general_dilated",
        "sort",
        "top_k",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "qr",
        "geqrf",
        "householder_product",
        "svd",
        "eig",
        "eigh",
        "cholesky",
        "lu",
        "triangular_solve",
        "fft",
        "reduce",
        "reduce_window_sum",
        "reduce_window_max",
    ]
)
"""Primitives whose results depend on several elements of an operand."""
TALKS = frozenset(
    [
        "psum",
        "psum2",
        "psum_invariant",
        "pmax",
        "pmin",
        "all_gather",
        "all_gather_invariant",
        "reduce_scatter",
        "all_to_all",
    ]
)
"""Primitives by which a transformation shows that it knows of the other shards."""


def check_elementwise(
    who: str, tx: optax.GradientTransformationExtraArgs, grads: PyTree, params: PyTree, extra_args: dict[str, Any]
) -> None:
    """Refuse a transformation that mixes elements of a leaf, unless it talks over the axis itself.

    Nothing is computed: its update is traced for the whole leaves.

    Raises:
      ValueError: if it does.
    """
    whole = abstract(params if params is not None else grads)

    def update(grads, state, params):
        return tx.update(grads, state, params, **extra_args)

    state = jax.eval_shape(tx.init, whole)
    given = None if params is None else whole
    equations = list(_equations(jax.make_jaxpr(update)(abstract(grads), state, given).jaxpr))
    names = {equation.primitive.name for equation in equations}
    mixing = sorted({one.primitive.name for one in equations if one.primitive.name in MIXES and _is_large(one)})
    if mixing and not names & TALKS:
        what = f"inner mixes elements of a leaf ({', '.join(mixing)}), which means something else on a shard of it."
        fix = (
            "use so.zero, which runs any optimizer; or one that works element by element, with "
            "so.transforms.clip_by_global_norm(..., split=True) inside of it for clipping."
        )
        raise ValueError(complaint(who, what, fix=fix))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _is_large(equation: Any) -> bool:
    return any(getattr(operand.aval, "size", 1) > 1 for operand in equation.invars)
