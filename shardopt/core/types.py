"""The values that strategies take and return, and the trees that they are kept in."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

PyTree = Any
TreeDef = Any
"""The structure of a pytree: `jax.tree_util.PyTreeDef`, which type checkers do not take for a type."""
Rule = tuple[str | re.Pattern[str], PartitionSpec]
PlaceLeaf = Callable[[str, tuple[int, ...]], PartitionSpec | None]
Rules = Sequence[Rule] | PlaceLeaf
"""`[(regex, PartitionSpec), ...]`, or a callable `(path, shape) -> PartitionSpec | None`."""


class TrainState(NamedTuple):
    """All that a training run carries from one step to the next.

    Attributes:
      step: int32 scalar, the number of steps taken.
      params: the parameter pytree, trainable and frozen leaves alike.
      opt_state: the state of the wrapped optax transformation (over the trainable leaves).
      rng: uint32 key data; step `n` uses `fold_in(rng, n)`.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    rng: Any


class Weighted(NamedTuple):
    """A loss (or metric) as a total and the weight it is to be divided by, or as several of them.

    The loss of a step is `sum(total) / sum(weight)` over the whole global batch, however it is cut
    into devices and micro-batches, so padded or masked tokens count exactly. With tuples of K totals and
    K weights it is the sum of K such quotients, each over its own weight:

        sum_k sum(total_k) / sum(weight_k)

    The weights are treated as constants: they must not depend on the parameters. With several terms they are summed
    before the loss is differentiated, with micro-batches by evaluating what they follow from once more; a pipeline and
    the parameter server take one term only.

    Attributes:
      total: a scalar, or a tuple of them.
      weight: a scalar, or a tuple of as many.

    Example:
      >>> import jax.numpy as jnp
      >>> mask = jnp.array([1.0, 1.0, 0.0])
      >>> Weighted(total=(jnp.array([2.0, 4.0, 9.0]) * mask).sum(), weight=mask.sum())
      Weighted(total=Array(6., dtype=float32), weight=Array(2., dtype=float32))
      >>> masked, z_loss = jnp.array([2.0, 4.0, 9.0]) * mask, jnp.array([0.1, 0.2, 0.3])
      >>> _ = Weighted(total=(masked.sum(), z_loss.sum()), weight=(mask.sum(), 3.0))  # a masked mean plus a mean
    """

    total: Any
    weight: Any


class Sum(NamedTuple):
    """A metric that adds up over the rows of the batch: `aux = {"tokens": so.Sum(mask.sum())}`.

    With v_i what device and micro-batch i returned, `metrics` holds sum_i v_i; over batches, `evaluation` adds them up.
    Where replicas train apart (`local_sgd`, `diloco`), these are the replicas of this process, since others would have to be
    waited for; in `history` of an asynchronous run they are what went into the update. So for `Max` and `Min`.

    Example:
      >>> import jax.numpy as jnp
      >>> Sum(jnp.array([True, True, False]).sum())
      Sum(value=Array(2, dtype=int32))
    """

    value: Any


class Max(NamedTuple):
    """A metric whose largest value counts: `aux = {"longest": so.Max(lengths.max())}`.

    With v_i what device and micro-batch i returned, `metrics` holds max_i v_i; over batches, `evaluation` takes the
    largest.

    Example:
      >>> import jax.numpy as jnp
      >>> Max(jnp.array([3, 5]).max())
      Max(value=Array(5, dtype=int32))
    """

    value: Any


class Min(NamedTuple):
    """A metric whose smallest value counts: `aux = {"margin": so.Min(margins.min())}`.

    With v_i what device and micro-batch i returned, `metrics` holds min_i v_i; over batches, `evaluation` takes the
    smallest.

    Example:
      >>> import jax.numpy as jnp
      >>> Min(jnp.array([3, 5]).min())
      Min(value=Array(3, dtype=int32))
    """

    value: Any


Metric = Weighted | Sum | Max | Min
"""A metric that says how its parts become one."""


Loss = jax.Array | Weighted | tuple[jax.Array | Weighted, dict[str, Any]]
"""What a loss returns: a scalar or `Weighted`, or that and an aux dict of metrics, each a mean, `Weighted`, `Sum`, `Max`, `Min`."""


class Updated(NamedTuple):
    """New values for frozen leaves (batch statistics, counters), returned by a loss in its aux dict.

    `values` is a nested dict that follows the parameter pytree, holding only the leaves that change:
    `aux = {"accuracy": acc, "stats": so.Updated({"batch_stats": new_stats})}`. Floating leaves take
    the mean over devices and micro-batches, integer leaves the maximum.
    """

    values: PyTree


def path_text(path: KeyPath) -> str:
    """Return a key path as names joined by slashes: `params["blocks"]["attention"]` is "blocks/attention"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_with_paths(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, each with its key path as text."""
    return [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def is_array_like(leaf: object) -> bool:
    """Return whether a leaf has a shape and a dtype: a numpy or jax array, or an abstract one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def abstract(tree: PyTree) -> PyTree:
    """Return the tree with `jax.ShapeDtypeStruct` leaves as jax would store them, reading no data."""

    def one(leaf):
        if not is_array_like(leaf):
            leaf = np.asarray(leaf)
        dtype = leaf.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):  # such as typed random keys
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(one, tree)


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which many values of this one are summed: fp32 at least, complex where it is complex.

    Written out, because `jnp.promote_types` refuses to under `jax_numpy_dtype_promotion="strict"`.
    """
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def merge_replicas(stacked: jax.Array, axis: int = 0) -> jax.Array:
    """Return the one value that stands for those of several replicas: the rule where their number changes.

    - Floating and complex leaves: the mean, computed in fp32 at least. It is what replicas agree on; and of
      error-feedback memories it is the mean that the next reduction adds to that of the gradients, so none is lost.
    - Integers and booleans: the maximum, as of `Updated`. Counts of steps are equal anyway.
    - Typed random keys, which have no order: the first.

    Args:
      stacked: the values of the replicas along `axis`.
      axis: which dim goes.

    Example:
      >>> import jax.numpy as jnp
      >>> merge_replicas(jnp.array([[1.0, 2.0], [3.0, 6.0]])).tolist(), int(merge_replicas(jnp.array([4, 5])))
      ([2.0, 4.0], 5)
    """
    if jnp.issubdtype(stacked.dtype, jnp.inexact):
        return jnp.mean(stacked, axis, dtype=wide_dtype(stacked.dtype)).astype(stacked.dtype)
    if jnp.issubdtype(stacked.dtype, jax.dtypes.prng_key):
        return jax.lax.index_in_dim(stacked, 0, axis, keepdims=False)
    return jnp.max(stacked, axis)
