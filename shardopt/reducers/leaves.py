"""Gradient trees as lists of real arrays that are wide enough to be summed, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.errors import complaint, plural
from shardopt.core.types import PyTree, is_array_like, wide_dtype
from shardopt.partition.paths import leaves_with_paths


def check_leaves(who: str, tree: PyTree) -> None:
    """Refuse leaves that have no mean.

    Raises:
      TypeError: if a leaf is not a floating or complex array.
    """
    wrong = [
        f"{path or 'the tree itself'}: {leaf.dtype if is_array_like(leaf) else type(leaf).__name__}"
        for path, leaf in leaves_with_paths(tree)
        if not is_array_like(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        what = f"{plural(len(wrong), 'leaf')} cannot be reduced: a mean needs floating or complex arrays."
        raise TypeError(complaint(who, what, wrong, "leave such leaves out, for instance with optax.masked."))


def check_alike(who: str, what: str, tree: PyTree, reference: PyTree) -> None:
    """Refuse a tree that does not have the structure and shapes of another.

    Raises:
      ValueError: if structure or shapes differ.
    """
    if jax.tree.structure(tree) != jax.tree.structure(reference):
        raise ValueError(complaint(who, f"the gradients have another tree structure than {what}."))
    pairs = zip(leaves_with_paths(tree), jax.tree.leaves(reference), strict=True)
    wrong = [
        f"{path}: {leaf.shape}, was {known.shape}" for (path, leaf), known in pairs if jnp.shape(leaf) != known.shape
    ]
    if wrong:
        what = (
            f"{plural(len(wrong), 'gradient leaf')} {'has' if len(wrong) == 1 else 'have'} another shape than {what}."
        )
        raise ValueError(complaint(who, what, wrong))


def zeros_like(tree: PyTree) -> PyTree:
    """Return zeros of the shapes of a tree, abstract or not, in the dtypes that sums are kept in."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide_dtype(leaf.dtype)), tree)


def widen(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves as real arrays of the dtypes that sums are kept in; a complex [...] becomes [..., 2]."""
    return [_as_real(leaf.astype(wide_dtype(leaf.dtype))) for leaf in leaves]


def narrow(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Undo `widen`: return arrays of these dtypes."""
    return [_as_complex(value, dtype).astype(dtype) for value, dtype in zip(values, dtypes, strict=True)]


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of the real and imaginary parts, or the dtype itself where it is real."""
    return jnp.finfo(dtype).dtype


def real_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape that a leaf has as a real array."""
    return (*leaf.shape, 2) if _is_complex(leaf.dtype) else tuple(leaf.shape)


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _as_real(x: Any) -> Any:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1) if _is_complex(x.dtype) else x


def _as_complex(x: Any, dtype: Any) -> Any:
    return jax.lax.complex(x[..., 0], x[..., 1]) if _is_complex(dtype) else x
