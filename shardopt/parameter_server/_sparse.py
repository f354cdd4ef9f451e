"""Sparse leaves, where a step changes few rows: only these rows are pushed, and only these are
updated.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
import optax

from shardopt.core._errors import error_text, format_error
from shardopt.core._types import PyTree, abstract, leaves_with_paths
from shardopt.parameter_server._by_row import ROWS, SAME, SHAPE, UNIFORM, RowLabel, compare

CALLER = "parameter_server"
FIX = "use an optimizer and a rule whose state is elementwise, or leave sparse out."
_LEAST = 8
"""The least number of rows of a program. Row counts are padded to powers of two, so that few
programs are compiled.
"""


class SparseRows(NamedTuple):
    """The gradient of a leaf [n, ...] that is zero except in a few rows.

    Rows that are listed twice are summed.

    Attributes:
      indices: integers [k].
      values: [k, ...].
    """

    indices: np.ndarray | jax.Array
    values: np.ndarray | jax.Array


def is_rows(leaf: object) -> TypeGuard[SparseRows]:
    """Return whether a leaf is a `SparseRows`."""
    return isinstance(leaf, SparseRows)


def has_rows(grads: PyTree) -> bool:
    """Return whether some leaf of a gradient is a `SparseRows`."""
    return any(map(is_rows, jax.tree.leaves(grads, is_leaf=is_rows)))


def values_of(grads: PyTree) -> PyTree:
    """Return the gradient with each sparse leaf replaced by its values."""
    return jax.tree.map(lambda leaf: leaf.values if is_rows(leaf) else leaf, grads, is_leaf=is_rows)


def check_sparse(sparse: Iterable[str]) -> tuple[str, ...]:
    """Return the regular expressions as a tuple, or raise if one is not a valid regular expression."""
    if (
        isinstance(sparse, str)
        or not isinstance(sparse, Iterable)
        or not all(isinstance(p, str) for p in sparse)
    ):
        raise TypeError(
            error_text(f"sparse must be a sequence of regular expressions, got {sparse!r}.")
        )
    for pattern in sparse:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                error_text(f"sparse must be regular expressions, got {pattern!r} ({error}).")
            ) from None
    return tuple(sparse)


def check_matches(sparse: Sequence[str], trained_params: PyTree) -> None:
    """Refuse patterns that match no trained leaf with rows."""
    leaves = leaves_with_paths(trained_params)
    unmatched = [
        p for p in sparse if not any(re.search(p, path) and leaf.ndim >= 1 for path, leaf in leaves)
    ]
    if unmatched:
        fix = f"the trained leaves are {', '.join(path for path, _ in leaves[:8])}."
        raise ValueError(
            error_text("sparse has patterns that match no trained leaf with rows.", unmatched, fix)
        )


def to_sparse_rows(grads: PyTree, sparse: Sequence[str]) -> PyTree:
    """Return the gradient with each matching leaf as the `SparseRows`, in numpy, of its rows that
    are not zero.
    """
    leaves = [
        (
            _nonzero_rows(leaf)
            if leaf.ndim and any(re.search(pattern, path) for pattern in sparse)
            else leaf
        )
        for path, leaf in leaves_with_paths(grads)
    ]
    return jax.tree.unflatten(jax.tree.structure(grads), leaves)


def _nonzero_rows(grad: jax.Array) -> SparseRows:
    indices = np.flatnonzero(np.asarray(_nonzero_row_mask(grad))).astype(np.int32)
    padded = np.zeros(_padded_count(len(indices)), np.int32)
    padded[: len(indices)] = indices
    return SparseRows(indices, np.asarray(_gather_rows(grad, padded))[: len(indices)])


@jax.jit
def _nonzero_row_mask(grad: jax.Array) -> jax.Array:
    return (grad != 0).reshape(grad.shape[0], -1).any(1)  # NaN is not 0: it travels, and is refused


@jax.jit
def _gather_rows(grad: jax.Array, indices: np.ndarray) -> jax.Array:
    return grad[indices]


def _padded_count(count: int) -> int:
    return max(_LEAST, 1 << (count - 1).bit_length()) if count else _LEAST


def gather_union_rows(grads: Sequence[PyTree], params: PyTree) -> tuple[list[PyTree], PyTree]:
    """Return gradients whose sparse leaves are dense over the union of their rows, and the indices
    of these rows.

    The indices are padded with the index after the last row. For a dense leaf the array of indices
    is empty.
    """
    grad_leaves = [jax.tree.leaves(grad, is_leaf=is_rows) for grad in grads]
    row_indices: list[np.ndarray] = []
    for i, param in enumerate(jax.tree.leaves(params)):
        if not is_rows(grad_leaves[0][i]):
            row_indices.append(np.zeros(0, np.int32))
            continue
        indices = [np.asarray(leaves[i].indices) for leaves in grad_leaves]
        union, places = np.unique(np.concatenate(indices), return_inverse=True)
        rows = np.full(_padded_count(len(union)), param.shape[0], np.int32)
        rows[: len(union)] = union
        row_indices.append(rows)
        push_places = np.split(places, np.cumsum([len(x) for x in indices])[:-1])
        for leaves, places_in_union in zip(grad_leaves, push_places, strict=True):
            values = np.asarray(leaves[i].values)
            dense = np.zeros((len(rows), *values.shape[1:]), values.dtype)
            np.add.at(dense, places_in_union, values)
            leaves[i] = dense
    treedef = jax.tree.structure(params)
    return [treedef.unflatten(leaves) for leaves in grad_leaves], treedef.unflatten(row_indices)


def restrict_to_rows(
    tx: optax.GradientTransformation, run: Callable[..., Any]
) -> Callable[..., Any]:
    """Return an update like `run` that reads and changes only some rows of parameters and optimizer
    state.

    `run(params, states, pushes)` is an update program as in `apply.RunUpdate`. The returned
    function takes the `row_indices` from `gather_union_rows` as an additional first argument. It
    refuses an update whose result for some rows would differ from its result for the same rows
    among all rows.
    """

    def run_on_rows(row_indices, params, states, pushes):
        opt_state, rule_state = states
        if jax.tree.leaves(rule_state):
            raise ValueError(
                format_error(CALLER, "a rule with a state cannot take sparse pushes.", fix=FIX)
            )
        owners = _owners(tx, params, row_indices)
        _check_by_row(run, (params, states, pushes), owners, row_indices)
        leaf_indices = [*jax.tree.leaves(row_indices), np.zeros(0, np.int32)]
        state_indices = jax.tree.unflatten(
            jax.tree.structure(opt_state), [leaf_indices[owner] for owner in owners]
        )
        param_rows = jax.tree.map(_take_rows, params, row_indices)
        state_rows = jax.tree.map(_take_rows, opt_state, state_indices)
        if pushes.pulled is not None:
            pushes = pushes._replace(pulled=jax.tree.map(_take_rows, pushes.pulled, row_indices))
        result = run(param_rows, (state_rows, rule_state), pushes)
        return result._replace(
            params=jax.tree.map(_put_rows, result.params, params, row_indices),
            opt_state=jax.tree.map(_put_rows, result.opt_state, opt_state, state_indices),
        )

    return run_on_rows


DENSE = -1
"""The owner of a leaf that has no rows. As an index -1 also picks the last, empty array of row
indices.
"""


def _owners(tx: optax.GradientTransformation, params: PyTree, row_indices: PyTree) -> list[int]:
    """Return for each leaf of the optimizer's state the index of the sparse leaf whose rows it has.

    Or DENSE.
    """
    leaves, treedef = jax.tree.flatten(abstract(params))
    before = jax.tree.leaves(jax.eval_shape(tx.init, treedef.unflatten(leaves)))
    owners, bad_states = [DENSE] * len(before), []
    for i, (leaf, rows) in enumerate(zip(leaves, jax.tree.leaves(row_indices), strict=True)):
        if rows.shape == (0,):
            continue
        longer_leaf = _resized(leaf, leaf.shape[0] + 1)
        after = jax.tree.leaves(
            jax.eval_shape(tx.init, treedef.unflatten([*leaves[:i], longer_leaf, *leaves[i + 1 :]]))
        )
        for j, (old, new) in enumerate(zip(before, after, strict=True)):
            if old.shape != new.shape:
                owners[j] = i
                if old.shape[:1] != leaf.shape[:1] or new.shape != (
                    longer_leaf.shape[0],
                    *old.shape[1:],
                ):
                    state = f"state {old.dtype}{list(old.shape)}"
                    bad_states.append(f"{state} of a parameter {leaf.dtype}{list(leaf.shape)}")
    if bad_states:
        problem = "the optimizer keeps state that has no row for each row of a sparse leaf."
        raise ValueError(format_error(CALLER, problem, bad_states, FIX))
    return owners


def _check_by_row(
    run: Callable[..., Any], args: tuple[Any, ...], state_owners: list[int], row_indices: PyTree
) -> None:
    """Refuse an update that is not proved to treat some rows as it treats the same rows among all.

    The update is traced twice, for all rows and for some. The gradient of a row that nobody pushed
    is known to be 0, but its parameters are not known. So a norm of the gradients over some rows
    equals the norm over all rows, and a norm of the parameters does not.
    """
    param_owners = [
        i if x.shape != (0,) else DENSE for i, x in enumerate(jax.tree.leaves(row_indices))
    ]
    all_counts, some_counts = _row_counts(args[0], param_owners, row_indices)
    owners, labels = _owners_and_labels(args, param_owners, state_owners)
    leaves, treedef = jax.tree.flatten(abstract(args))

    def traced(counts):
        sized_leaves = [
            leaf if owner == DENSE else _resized(leaf, counts[owner])
            for leaf, owner in zip(leaves, owners, strict=True)
        ]
        return jax.make_jaxpr(run)(*treedef.unflatten(sized_leaves))

    try:
        all_rows, some_rows = traced(all_counts), traced(some_counts)
    except TypeError as error:
        problem = "the optimizer or the rule cannot be traced for some rows of a sparse leaf."
        raise ValueError(format_error(CALLER, problem, [str(error).split("\n")[0]], FIX)) from error
    mixing_operations = frozenset[str]()
    result_labels = compare(all_rows, some_rows, labels)
    for label, a, b in zip(result_labels, all_rows.out_avals, some_rows.out_avals, strict=True):
        if label.kind not in ((SAME,) if a.shape == b.shape else (ROWS, UNIFORM)):
            mixing_operations |= label.primitives or {SHAPE}
    if mixing_operations:
        operations = (
            ", ".join(sorted(mixing_operations - {SHAPE})) or "it depends on the number of rows"
        )
        problem = (
            "the optimizer or the rule does not act on each row of a sparse leaf by itself"
            f" ({operations})."
        )
        fix = (
            "use what acts row by row, such as sgd, adam or a clip of gradients before them; or"
            " leave sparse out."
        )
        raise ValueError(format_error(CALLER, problem, fix=fix))


def _row_counts(
    params: PyTree, param_owners: list[int], row_indices: PyTree
) -> tuple[list[int], list[int]]:
    """Return the number of all rows of each leaf, and a smaller or larger number of some rows."""
    all_counts = [
        leaf.shape[0] if owner != DENSE else 0
        for owner, leaf in zip(param_owners, jax.tree.leaves(params), strict=True)
    ]
    # each differs from the counts of other leaves, so that rows of two leaves are not mixed
    some_counts: list[int] = []
    for indices, all_count in zip(jax.tree.leaves(row_indices), all_counts, strict=True):
        taken = {*some_counts, all_count}
        some_counts.append(next(n for n in itertools.count(indices.shape[0]) if n not in taken))
    return all_counts, some_counts


def _owners_and_labels(
    args: tuple[Any, ...], param_owners: list[int], state_owners: list[int]
) -> tuple[list[int], list[RowLabel]]:
    """Return the owner of each leaf of the arguments of an update, and the label of its rows."""
    pushes = args[2]
    owners, zeros = [*param_owners, *state_owners], [None] * len(param_owners + state_owners)
    for _, *loss_and_metrics in pushes.pushed:
        num_scalars = len(jax.tree.leaves(loss_and_metrics))
        owners += [*param_owners, *[DENSE] * num_scalars]
        zeros += [*[0.0] * len(param_owners), *[None] * num_scalars]
    owners += [DENSE, *([] if pushes.pulled is None else param_owners), DENSE]
    zeros += [None] * (len(owners) - len(zeros))
    labels = [
        RowLabel(SAME) if owner == DENSE else RowLabel(ROWS, at_zero=zero)
        for owner, zero in zip(owners, zeros, strict=True)
    ]
    return owners, labels


def _resized(leaf: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)


def _take_rows(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf if rows.shape == (0,) else leaf.at[rows].get(mode="fill", fill_value=0)


def _put_rows(new_rows: jax.Array, leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return new_rows if rows.shape == (0,) else leaf.at[rows].set(new_rows, mode="drop")
