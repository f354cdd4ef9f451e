"""Leaves of which a step touches few rows: only these travel, and only these are updated."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, leaves_with_paths

_LEAST = 8
"""Rows in the smallest program; sizes are powers of two, so that few programs are compiled."""


class SparseRows(NamedTuple):
    """The gradient of a leaf [n, ...] that is zero but in some rows; rows named twice are summed.

    Attributes:
      indices: integers [k].
      values: [k, ...].
    """

    indices: np.ndarray | jax.Array
    values: np.ndarray | jax.Array


def is_rows(leaf: object) -> TypeGuard[SparseRows]:
    """Return whether this is a sparse leaf."""
    return isinstance(leaf, SparseRows)


def values_of(grads: PyTree) -> PyTree:
    """Return the gradient with only the values of sparse leaves."""
    return jax.tree.map(lambda leaf: leaf.values if is_rows(leaf) else leaf, grads, is_leaf=is_rows)


def check_sparse(who: str, sparse: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple."""
    if isinstance(sparse, str) or not isinstance(sparse, Iterable) or not all(isinstance(p, str) for p in sparse):
        raise TypeError(f"{who}: sparse must be a sequence of regular expressions, got {sparse!r}.")
    for pattern in sparse:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{who}: sparse must be regular expressions, got {pattern!r} ({error}).") from None
    return tuple(sparse)


def check_matches(who: str, sparse: Sequence[str], part: PyTree) -> None:
    """Refuse patterns that match no trained leaf with rows."""
    leaves = leaves_with_paths(part)
    idle = [p for p in sparse if not any(re.search(p, path) and leaf.ndim >= 1 for path, leaf in leaves)]
    if idle:
        fix = f"the trained leaves are {', '.join(path for path, _ in leaves[:8])}."
        raise ValueError(format_error(who, "sparse has patterns that match no trained leaf with rows.", idle, fix))


def shrink(grads: PyTree, sparse: Sequence[str]) -> PyTree:
    """Return the gradient with the leaves that match as `SparseRows`, in numpy, of the rows that are not zero."""
    found = [
        _rows_of(leaf) if leaf.ndim and any(re.search(pattern, path) for pattern in sparse) else leaf
        for path, leaf in leaves_with_paths(grads)
    ]
    return jax.tree.unflatten(jax.tree.structure(grads), found)


def _rows_of(grad: jax.Array) -> SparseRows:
    indices = np.flatnonzero(np.asarray(_touched(grad))).astype(np.int32)
    padded = np.zeros(_bucket(len(indices)), np.int32)
    padded[: len(indices)] = indices
    return SparseRows(indices, np.asarray(_take(grad, padded))[: len(indices)])


@jax.jit
def _touched(grad: jax.Array) -> jax.Array:
    return (grad != 0).reshape(grad.shape[0], -1).any(1)  # NaN is not 0: it travels, and is refused


@jax.jit
def _take(grad: jax.Array, indices: np.ndarray) -> jax.Array:
    return grad[indices]


def _bucket(count: int) -> int:
    return max(_LEAST, 1 << (count - 1).bit_length()) if count else _LEAST


def on_union(grads: Sequence[PyTree], params: PyTree) -> tuple[list[PyTree], PyTree]:
    """Return gradients whose sparse leaves are dense over the rows that any of them touches, and which rows these are.

    Rows are padded with one beyond the last; for a dense leaf the array of rows is empty.
    """
    flats = [jax.tree.leaves(one, is_leaf=is_rows) for one in grads]
    where: list[np.ndarray] = []
    for i, param in enumerate(jax.tree.leaves(params)):
        if not is_rows(flats[0][i]):
            where.append(np.zeros(0, np.int32))
            continue
        indices = [np.asarray(flat[i].indices) for flat in flats]
        union, places = np.unique(np.concatenate(indices), return_inverse=True)
        rows = np.full(_bucket(len(union)), param.shape[0], np.int32)
        rows[: len(union)] = union
        where.append(rows)
        for flat, mine in zip(flats, np.split(places, np.cumsum([len(x) for x in indices])[:-1]), strict=True):
            values = np.asarray(flat[i].values)
            dense = np.zeros((len(rows), *values.shape[1:]), values.dtype)
            np.add.at(dense, mine, values)
            flat[i] = dense
    treedef = jax.tree.structure(params)
    return [treedef.unflatten(flat) for flat in flats], treedef.unflatten(where)


def on_rows(tx: optax.GradientTransformation, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` of an update, but on some rows of parameters and optimizer state only.

    `run(params, opt_state, rule_state, ...)` as in `make_apply`; the result takes `where`, from `on_union`, first.
    """

    def wrapped(where, params, opt_state, rule_state, pushed, rows, pulled, delay):
        _check_state(tx, params, opt_state, rule_state, where)
        part = jax.tree.map(_get, params, where)
        state = optax.tree_utils.tree_map_params(tx, _get, opt_state, where)
        pulled = None if pulled is None else jax.tree.map(_get, pulled, where)
        found = run(part, state, rule_state, pushed, rows, pulled, delay)
        old = iter(_param_leaves(tx, opt_state, where))
        new_state = optax.tree_utils.tree_map_params(
            tx, lambda part, rows: _put(part, next(old), rows), found.opt_state, where
        )
        return found._replace(params=jax.tree.map(_put, found.params, params, where), opt_state=new_state)

    return wrapped


def _param_leaves(tx: optax.GradientTransformation, opt_state: PyTree, where: PyTree) -> list[jax.Array]:
    """Return the leaves of the optimizer's state that belong to parameters, in the order in which they are mapped."""
    found: list[jax.Array] = []
    optax.tree_utils.tree_map_params(tx, lambda leaf, _: found.append(leaf), opt_state, where)
    return found


def _check_state(
    tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree, rule_state: PyTree, where: PyTree
) -> None:
    """Refuse states that have no rows to take."""
    fix = "use an optimizer and a rule whose state is elementwise, or leave sparse out."
    if jax.tree.leaves(rule_state):
        raise ValueError(format_error("parameter_server", "a rule with a state cannot take sparse pushes.", fix=fix))
    bad: list[str] = []

    def check(leaf, param, rows):
        if rows.shape != (0,) and leaf.shape != param.shape:
            bad.append(f"state {leaf.dtype}{list(leaf.shape)} of a parameter {param.dtype}{list(param.shape)}")
        return leaf

    optax.tree_utils.tree_map_params(tx, check, opt_state, params, where)
    if bad:
        what = "the optimizer keeps state that has no row for each row of a sparse leaf."
        raise ValueError(format_error("parameter_server", what, bad, fix))


def _get(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf if rows.shape == (0,) else leaf.at[rows].get(mode="fill", fill_value=0)


def _put(part: jax.Array, leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return part if rows.shape == (0,) else leaf.at[rows].set(part, mode="drop")
