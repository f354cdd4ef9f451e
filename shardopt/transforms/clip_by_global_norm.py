"""`clip_by_global_norm`: one norm over all devices, each element counted once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.core.arguments import check_is_number
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, leaves_with_paths, wide_dtype
from shardopt.reducers.axis import AxisName, axis_names, axis_size, is_bound, tracks_varying, varying
from shardopt.reducers.reducer import check_leaves, real_dtype

WHO = "clip_by_global_norm"


def clip_by_global_norm(
    max_norm: float | jax.Array, axis_names: AxisName, *, split: bool | PyTree = None
) -> optax.GradientTransformationExtraArgs:
    """Scale gradients so that their norm over all devices is at most `max_norm`, counting each element once.

    g <- g min(1, max_norm / |g|), where |g|^2 = sum over sharded leaves of psum(sum x^2) + sum over replicated leaves
    of sum x^2.

    A leaf that is sharded over an axis holds other elements on each device; a replicated one holds the same elements
    on all, so it counts once. Values cannot tell which is which, therefore something must: `split`, or the types of a
    `shard_map` with `check_vma=True`, which say along which axes a leaf varies. Without either, `update` is refused.
    Average gradients first: replicated leaves that still differ between devices have no one norm.

    **Equivalence**: `optax.clip_by_global_norm(max_norm)` of the unsharded gradients, up to summation order, NaN and
    inf included.

    **Placement**: no state.

    **Communication**: an all-reduce of one number for each set of axes that leaves are sharded over.

    Args:
      max_norm: the largest norm.
      axis_names: the axis or axes that leaves are sharded over.
      split: True (each leaf is sharded over all of `axis_names`), False (none is), or the `PartitionSpec`s that
        `shard_map` has for these leaves: a tree like the gradients, or a prefix of it, where True and False may stand
        as well. By default what the types say.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_norm` is not positive; in `update`, if an axis is not bound, nothing says what is sharded,
        `split` is no prefix of the gradients, a spec names a bound axis that is not in `axis_names`, or a leaf is said
        to be sharded which by its type is replicated.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> from jax.sharding import PartitionSpec as P
      >>> tx = so.transforms.clip_by_global_norm(2.5, "data", split={"shard": P("data"), "whole": P()})
      >>> grads = {"shard": jnp.array([[0.0], [4.0]]), "whole": jnp.array([[3.0], [3.0]])}  # the norm is 5
      >>> print(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)["whole"])
      [[1.5]
       [1.5]]
    """
    names = _checked_names(axis_names)
    _check_max_norm(max_norm)
    _check_split(split)

    def init(params):
        return optax.EmptyState()

    def update(updates, state, params=None, **extra_args: PyTree):
        check_leaves(WHO, updates)
        axis_size(WHO, names)
        leaves, treedef = jax.tree.flatten(updates)
        if not leaves:
            return updates, state
        over = _axes_of_leaves(updates, names, split)
        norm = jnp.sqrt(_sum_of_squares(leaves, over))
        return treedef.unflatten([_scaled(leaf, norm, max_norm) for leaf in leaves]), state

    return optax.GradientTransformationExtraArgs(init, update)


def _sum_of_squares(leaves: Sequence[jax.Array], over: Sequence[tuple[str, ...]]) -> jax.Array:
    squares = [jnp.sum(jnp.square(jnp.abs(leaf.astype(wide_dtype(leaf.dtype))))) for leaf in leaves]
    widest = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
    total = jnp.zeros((), widest)
    for axes in dict.fromkeys(over):
        part = sum(square.astype(widest) for square, own in zip(squares, over, strict=True) if own == axes)
        total = total + (jax.lax.psum(part, axes) if axes else part)
    return total


def _scaled(leaf: jax.Array, norm: jax.Array, max_norm: float | jax.Array) -> jax.Array:
    """As optax: not min(1, max_norm / norm), so that a NaN norm reaches every leaf; in fp32 at least."""
    wide = wide_dtype(leaf.dtype)
    real = real_dtype(wide)
    clipped = leaf.astype(wide) / norm.astype(real) * jnp.asarray(max_norm, real)
    return jnp.where(norm < max_norm, leaf, clipped.astype(leaf.dtype))


def _axes_of_leaves(updates: PyTree, names: tuple[str, ...], split: bool | PyTree) -> list[tuple[str, ...]]:
    tracked = tracks_varying(names)
    leaves = leaves_with_paths(updates)
    if split is None:
        if not tracked:
            problem = "nothing says which leaves are split over the axis and which are whole: types do not tell it here."
            fix = "pass split=True, False, or the PartitionSpecs of the leaves; or use shard_map with check_vma=True."
            raise ValueError(format_error(WHO, problem, fix=fix))
        return [tuple(name for name in names if name in varying(leaf)) for _, leaf in leaves]
    over = [_axes_of(entry, names) for entry in _per_leaf(split, updates)]
    if tracked:
        pairs = zip(leaves, over, strict=True)
        wrong = [f"{path}: split over {axes}" for (path, leaf), axes in pairs if not set(axes) <= varying(leaf)]
        if wrong:
            problem = f"{plural(len(wrong), 'leaf')} said to be split by split= cannot be: its type does not vary."
            raise ValueError(format_error(WHO, problem, wrong, "say what is whole, or leave split= out."))
    return over


def _per_leaf(split: bool | PyTree, updates: PyTree) -> list[PartitionSpec | bool]:
    def is_entry(node):
        return isinstance(node, PartitionSpec | bool)

    try:
        spread = jax.tree.map(
            lambda one, part: jax.tree.map(lambda _: _Entry(one), part), split, updates, is_leaf=is_entry
        )
    except ValueError as error:
        problem = "split is neither like the gradients nor a prefix of their tree."
        raise ValueError(format_error(WHO, problem, fix="give it the specs that shard_map has for them.")) from error
    return [entry.value for entry in jax.tree.leaves(spread)]


class _Entry:
    """Keeps a spec from being taken for a tree."""

    def __init__(self, value: Any):
        self.value = value


def _axes_of(entry: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(entry, bool):
        return names if entry else ()
    listed = [name for part in entry if part is not None for name in ((part,) if isinstance(part, str) else part)]
    missing = [name for name in listed if name not in names and is_bound(name)]
    if missing:
        problem = f"{entry} splits over {missing[0]!r}, which is not among axis_names={names}."
        raise ValueError(format_error(WHO, problem, fix="name every axis that leaves are split over."))
    return tuple(name for name in names if name in listed)


def _checked_names(names: AxisName) -> tuple[str, ...]:
    return axis_names(WHO, names)


def _check_max_norm(max_norm: float | jax.Array) -> None:
    if isinstance(max_norm, jax.Array):
        return
    check_is_number(WHO, "max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(format_error(WHO, f"max_norm must be above 0, got {max_norm}."))


def _check_split(split: bool | PyTree) -> None:
    if split is None or isinstance(split, bool | PartitionSpec):
        return
    entries = jax.tree.leaves(split, is_leaf=lambda node: isinstance(node, PartitionSpec))
    wrong = [repr(entry) for entry in entries if not isinstance(entry, bool | PartitionSpec)]
    if wrong:
        problem = "split must be True, False or a tree of PartitionSpecs."
        raise TypeError(format_error(WHO, problem, wrong))
