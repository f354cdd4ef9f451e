"""Leaves of which a step touches few rows: only these travel, and only these are updated."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract, leaves_with_paths
from shardopt.transforms.elementwise import compare
from shardopt.transforms.primitives import ELEMENT, SAME, SHAPE, Label, LeafSplit

WHO = "parameter_server"
FIX = "use an optimizer and a rule whose state is elementwise, or leave sparse out."
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
    An update that would treat some rows otherwise than it treats them among all is refused.
    """

    def wrapped(where, params, opt_state, rule_state, pushed, rows, pulled, delay):
        if jax.tree.leaves(rule_state):
            raise ValueError(format_error(WHO, "a rule with a state cannot take sparse pushes.", fix=FIX))
        owners = _owners(tx, params, where)
        _check_by_row(run, (params, opt_state, rule_state, pushed, rows, pulled, delay), owners, where)
        of_leaf = [*jax.tree.leaves(where), np.zeros(0, np.int32)]
        of_state = jax.tree.unflatten(jax.tree.structure(opt_state), [of_leaf[owner] for owner in owners])
        part, state = jax.tree.map(_get, params, where), jax.tree.map(_get, opt_state, of_state)
        pulled = None if pulled is None else jax.tree.map(_get, pulled, where)
        found = run(part, state, rule_state, pushed, rows, pulled, delay)
        return found._replace(
            params=jax.tree.map(_put, found.params, params, where),
            opt_state=jax.tree.map(_put, found.opt_state, opt_state, of_state),
        )

    return wrapped


DENSE = -1
"""The owner of a leaf that has no rows; also where its empty array of rows stands, after those of all parameters."""


def _owners(tx: optax.GradientTransformation, params: PyTree, where: PyTree) -> list[int]:
    """Return for each leaf of the optimizer's state the index of the sparse leaf whose rows it has; or DENSE."""
    leaves, treedef = jax.tree.flatten(abstract(params))
    before = jax.tree.leaves(jax.eval_shape(tx.init, treedef.unflatten(leaves)))
    owners, bad = [DENSE] * len(before), []
    for i, (leaf, rows) in enumerate(zip(leaves, jax.tree.leaves(where), strict=True)):
        if rows.shape == (0,):
            continue
        longer = _resized(leaf, leaf.shape[0] + 1)
        after = jax.tree.leaves(jax.eval_shape(tx.init, treedef.unflatten([*leaves[:i], longer, *leaves[i + 1 :]])))
        for j, (old, new) in enumerate(zip(before, after, strict=True)):
            if old.shape != new.shape:
                owners[j] = i
                if old.shape[:1] != leaf.shape[:1] or new.shape != (longer.shape[0], *old.shape[1:]):
                    bad.append(f"state {old.dtype}{list(old.shape)} of a parameter {leaf.dtype}{list(leaf.shape)}")
    if bad:
        what = "the optimizer keeps state that has no row for each row of a sparse leaf."
        raise ValueError(format_error(WHO, what, bad, FIX))
    return owners


def _check_by_row(run: Callable[..., Any], args: tuple[Any, ...], state_owners: list[int], where: PyTree) -> None:
    """Refuse an update that cannot be shown to treat some rows as it treats them among all.

    It is traced for all rows and for some. Of those that nobody pushed it is only known that their gradient is 0: so
    a norm of the gradients is that of all rows, and a norm of parameters is not.
    """
    params, opt_state, rule_state, pushed, rows, pulled, delay = args
    sparse = [i if x.shape != (0,) else DENSE for i, x in enumerate(jax.tree.leaves(where))]
    total = [leaf.shape[0] if i != DENSE else 0 for i, leaf in zip(sparse, jax.tree.leaves(params), strict=True)]
    some: list[int] = []  # never as many as of another leaf, whose rows are others
    for count, own in zip(jax.tree.leaves(where), total, strict=True):
        taken = {*some, own}
        some.append(next(n for n in range(count.shape[0], count.shape[0] + len(taken) + 1) if n not in taken))
    owners: list[int] = [*sparse, *state_owners]
    zeros = [None] * len(owners)
    for _, *others in pushed:
        num_others = len(jax.tree.leaves(others))
        owners += [*sparse, *[DENSE] * num_others]
        zeros += [*[0.0] * len(sparse), *[None] * num_others]
    owners += [DENSE, *([] if pulled is None else sparse), DENSE]
    leaves, treedef = jax.tree.flatten(abstract((params, opt_state, rule_state, pushed, rows, pulled, delay)))
    zeros += [None] * (len(leaves) - len(zeros))
    labels = [
        Label(SAME) if owner == DENSE else Label(ELEMENT, pad_value=zero)
        for owner, zero in zip(owners, zeros, strict=True)
    ]

    def traced(counts):
        sized = [
            leaf if owner == DENSE else _resized(leaf, counts[owner])
            for leaf, owner in zip(leaves, owners, strict=True)
        ]
        return jax.make_jaxpr(run)(*treedef.unflatten(sized))

    try:
        whole, part = traced(total), traced(some)
    except TypeError as error:
        what = "the optimizer or the rule cannot be traced for some rows of a sparse leaf."
        raise ValueError(format_error(WHO, what, [str(error).split("\n")[0]], FIX)) from error
    found = frozenset[str]()
    for label, a, b in zip(
        compare(whole, part, labels, LeafSplit(by_rows=True)), whole.out_avals, part.out_avals, strict=True
    ):
        if label.kind != (SAME if a.shape == b.shape else ELEMENT):
            found |= label.primitives or {SHAPE}
    if found:
        by = ", ".join(sorted(found - {SHAPE})) or "it depends on the number of rows"
        what = f"the optimizer or the rule does not act on each row of a sparse leaf by itself ({by})."
        fix = "use what acts row by row, such as sgd, adam or a clip of gradients before them; or leave sparse out."
        raise ValueError(format_error(WHO, what, fix=fix))


def _resized(leaf: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)


def _get(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf if rows.shape == (0,) else leaf.at[rows].get(mode="fill", fill_value=0)


def _put(part: jax.Array, leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return part if rows.shape == (0,) else leaf.at[rows].set(part, mode="drop")
