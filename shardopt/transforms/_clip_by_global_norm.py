"""`clip_by_global_norm`: clip by a norm over all devices that counts each element once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.core._arguments import check_is_number
from shardopt.core._axis import AxisName, axis_names, axis_size, is_bound
from shardopt.core._errors import calling, format_error, plural
from shardopt.core._types import PyTree, leaves_with_paths, wide_dtype
from shardopt.mesh import spec_axes
from shardopt.reducers._axis import tracks_varying, varying
from shardopt.reducers._reducer import check_leaves, real_dtype

CALLER = "clip_by_global_norm"


@calling(CALLER)
def clip_by_global_norm(
    max_norm: float | jax.Array, axis_names: AxisName, *, split: bool | PyTree = None
) -> optax.GradientTransformationExtraArgs:
    """Scale gradients so that their norm over all devices is at most `max_norm`, counting each
    element once.

    g <- g min(1, max_norm / |g|), where |g|^2 is the sum over sharded leaves of psum(sum x^2), plus
    the sum over replicated leaves of sum x^2.

    Args:
      max_norm: the largest norm.
      axis_names: the axis or axes that leaves are sharded over.
      split: which leaves are sharded; by default the types decide. One of

        - True: each leaf is sharded over all of `axis_names`;
        - False: no leaf is sharded;
        - a tree like the gradients, or a prefix of it, of True, False, and the `PartitionSpec`s
          that `shard_map` has for these leaves.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_norm` is not positive. In `update`, if an axis is not bound, or if neither
        `split` nor types show which leaves are sharded. Also if `split` is not a prefix of the
        gradients, a spec names a bound axis that is not in `axis_names`, or `split` shards a leaf
        whose type is replicated.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> from jax.sharding import PartitionSpec as P
      >>> tx = so.transforms.clip_by_global_norm(2.5, "data", split={"shard": P("data"), "whole": P()})
      >>> grads = {"shard": jnp.array([[0.0], [4.0]]), "whole": jnp.array([[3.0], [3.0]])}  # the norm is 5
      >>> print(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)["whole"])
      [[1.5]
       [1.5]]

    A leaf that is sharded over an axis has different elements on each device. A replicated leaf has
    the same elements on all devices, so it must count once. Values do not show which leaves are
    sharded. `update` takes this from `split`, or from the types of a `shard_map` with
    `check_vma=True`, and raises an error if it has neither.

    Average the gradients first: replicated leaves that still differ between devices have no common
    norm.

    **Equivalence**: equal to `optax.clip_by_global_norm(max_norm)` of the unsharded gradients, up
    to summation order, also for NaN and inf.

    **Placement**: no state.

    **Communication**: an all-reduce of one number for each set of axes that leaves are sharded
    over.
    """
    names = _checked_names(axis_names)
    _check_max_norm(max_norm)
    _check_split(split)

    def init(params):
        return optax.EmptyState()

    @calling(CALLER)
    def update(updates, state, params=None, **extra_args: PyTree):
        check_leaves(updates)
        axis_size(names)
        leaves, treedef = jax.tree.flatten(updates)
        if not leaves:
            return updates, state
        leaf_axes = _axes_of_leaves(updates, names, split)
        norm = jnp.sqrt(_sum_of_squares(leaves, leaf_axes))
        return treedef.unflatten([_scaled(leaf, norm, max_norm) for leaf in leaves]), state

    return optax.GradientTransformationExtraArgs(init, update)


def _sum_of_squares(leaves: Sequence[jax.Array], leaf_axes: Sequence[tuple[str, ...]]) -> jax.Array:
    """Return the sum of squares over all devices, given the axes that each leaf is sharded over."""
    leaf_sums = [
        jnp.sum(jnp.square(jnp.abs(leaf.astype(wide_dtype(leaf.dtype))))) for leaf in leaves
    ]
    widest_dtype = max((leaf_sum.dtype for leaf_sum in leaf_sums), key=lambda dtype: dtype.itemsize)
    total = jnp.zeros((), widest_dtype)
    for group_axes in dict.fromkeys(leaf_axes):
        local_sum = sum(
            leaf_sum.astype(widest_dtype)
            for leaf_sum, axes in zip(leaf_sums, leaf_axes, strict=True)
            if axes == group_axes
        )
        total = total + (jax.lax.psum(local_sum, group_axes) if group_axes else local_sum)
    return total


def _scaled(leaf: jax.Array, norm: jax.Array, max_norm: float | jax.Array) -> jax.Array:
    """Return a clipped leaf, computed in fp32 or wider.

    The formula is optax's. Unlike min(1, max_norm / norm), it carries a NaN norm to every leaf.
    """
    wide = wide_dtype(leaf.dtype)
    norm_dtype = real_dtype(wide)
    clipped = leaf.astype(wide) / norm.astype(norm_dtype) * jnp.asarray(max_norm, norm_dtype)
    return jnp.where(norm < max_norm, leaf, clipped.astype(leaf.dtype))


def _axes_of_leaves(
    updates: PyTree, names: tuple[str, ...], split: bool | PyTree
) -> list[tuple[str, ...]]:
    """Return the axes that each leaf is sharded over, from `split` or from types."""
    types_track_axes = tracks_varying(names)
    leaves = leaves_with_paths(updates)
    if split is None:
        if not types_track_axes:
            problem = (
                "nothing says which leaves are split over the axis and which are whole: types do"
                " not tell it here."
            )
            fix = (
                "pass split=True, False, or the PartitionSpecs of the leaves; or use shard_map with"
                " check_vma=True."
            )
            raise ValueError(format_error(CALLER, problem, fix=fix))
        return [tuple(name for name in names if name in varying(leaf)) for _, leaf in leaves]
    leaf_axes = [_axes_of(entry, names) for entry in _split_of_leaves(split, updates)]
    if types_track_axes:
        pairs = zip(leaves, leaf_axes, strict=True)
        wrong = [
            f"{path}: split over {axes}"
            for (path, leaf), axes in pairs
            if not set(axes) <= varying(leaf)
        ]
        if wrong:
            problem = (
                f"{plural(len(wrong), 'leaf')} said to be split by split= cannot be: its type does"
                " not vary."
            )
            raise ValueError(
                format_error(CALLER, problem, wrong, "say what is whole, or leave split= out.")
            )
    return leaf_axes


def _split_of_leaves(split: bool | PyTree, updates: PyTree) -> list[PartitionSpec | bool]:
    try:
        return jax.tree.leaves(jax.tree.broadcast(split, updates))
    except ValueError as error:
        problem = "split is neither like the gradients nor a prefix of their tree."
        raise ValueError(
            format_error(CALLER, problem, fix="give it the specs that shard_map has for them.")
        ) from error


def _axes_of(entry: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(entry, bool):
        return names if entry else ()
    spec_names = spec_axes(entry)
    missing = [name for name in spec_names if name not in names and is_bound(name)]
    if missing:
        problem = f"{entry} splits over {missing[0]!r}, which is not among axis_names={names}."
        raise ValueError(
            format_error(CALLER, problem, fix="name every axis that leaves are split over.")
        )
    return tuple(name for name in names if name in spec_names)


def _checked_names(names: AxisName) -> tuple[str, ...]:
    return axis_names(names)


def _check_max_norm(max_norm: float | jax.Array) -> None:
    if isinstance(max_norm, jax.Array):
        return
    check_is_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(format_error(CALLER, f"max_norm must be above 0, got {max_norm}."))


def _check_split(split: bool | PyTree) -> None:
    if wrong := [
        repr(entry)
        for entry in jax.tree.leaves(split)
        if not isinstance(entry, bool | PartitionSpec)
    ]:
        problem = "split must be True, False or a tree of PartitionSpecs."
        raise TypeError(format_error(CALLER, problem, wrong))
